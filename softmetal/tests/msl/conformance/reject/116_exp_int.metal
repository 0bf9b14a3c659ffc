// certain: exp(int) is ambiguous
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = exp(x[0]); }  // HERE
