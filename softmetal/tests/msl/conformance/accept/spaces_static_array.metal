// certain: twin of the refused program: a global array is in constant memory (slang #4373)
#include <metal_stdlib>
using namespace metal;
constant float table[2] = {1, 2};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = table[1]; }
