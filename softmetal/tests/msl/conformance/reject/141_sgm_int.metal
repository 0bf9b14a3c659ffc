// certain: simdgroup_matrix<int,8,8>
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { simdgroup_matrix<int,8,8> m; x[0]=m.thread_elements()[0]; }  // HERE
