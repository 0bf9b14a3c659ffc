// certain: no vector -> scalar conversion
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { float2 f = 1; x[0] = f; }  // HERE
