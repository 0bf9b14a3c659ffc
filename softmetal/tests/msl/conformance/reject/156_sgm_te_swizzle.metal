// certain: `.thread_elements().x`: assigning float2 to a 64-wide storage_type
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 a; simdgroup_load(a,x); float2 v = a.thread_elements().xy * float2(2); a.thread_elements() = v; simdgroup_store(a,x); }  // HERE
