// certain: thread_index_in_threadgroup is a scalar
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]], uint3 i [[thread_index_in_threadgroup]]) { x[i.x]=1; }  // HERE
