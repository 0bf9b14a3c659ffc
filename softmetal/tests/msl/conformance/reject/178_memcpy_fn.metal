// certain: memcpy does not exist
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { memcpy(x, x+4, 16); }  // HERE
