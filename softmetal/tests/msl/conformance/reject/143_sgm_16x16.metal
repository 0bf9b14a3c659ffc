// certain: simdgroup_matrix<half,16,16>
#include <metal_stdlib>
using namespace metal;
kernel void k(device half* x [[buffer(0)]]) { simdgroup_matrix<half,16,16> m; x[0]=m.thread_elements()[0]; }  // HERE
