// certain: simd_sum of a pointer
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { x[0]=simd_sum(x)[0]; }  // HERE
