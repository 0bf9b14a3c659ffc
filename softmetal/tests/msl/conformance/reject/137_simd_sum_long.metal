// likely: simd_sum(long): 64-bit types are not in the reduction list
#include <metal_stdlib>
using namespace metal;
kernel void k(device long* x [[buffer(0)]]) { x[0]=simd_sum(x[0]); }  // HERE
