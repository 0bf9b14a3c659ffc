// certain: simdgroup_load from thread memory
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { float t[64]; simdgroup_float8x8 m; simdgroup_load(m, t, 8); x[0]=m.thread_elements()[0]; }  // HERE
