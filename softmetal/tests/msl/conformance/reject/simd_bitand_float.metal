// certain: simd_and of float (MSL specification 6.9, simdgroup functions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) { o[0] = simd_and(o[1]); }  // HERE
