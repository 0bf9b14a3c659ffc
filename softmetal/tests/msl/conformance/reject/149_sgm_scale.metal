// likely: matrix * scalar does not exist
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 a; simdgroup_load(a,x); a = a * 2.0f; simdgroup_store(a,x); }  // HERE
