// certain: `float2 v = m.thread_elements();`: storage_type is vec<float,64>, not float2 (header L63-67)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 a; simdgroup_load(a,x); float2 v = a.thread_elements(); x[0]=v.x+v.y; }  // HERE
