// certain: thread_index_in_simdgroup is a scalar
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]], uint2 i [[thread_index_in_simdgroup]]) { x[i.x]=1; }  // HERE
