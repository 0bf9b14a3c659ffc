// worth: half8x8 -> float8x8 assignment
#include <metal_stdlib>
using namespace metal;
kernel void k(device half* x [[buffer(0)]], device float* y [[buffer(1)]]) { simdgroup_half8x8 a; simdgroup_load(a,x); simdgroup_float8x8 b = a; simdgroup_store(b,y); }  // HERE
