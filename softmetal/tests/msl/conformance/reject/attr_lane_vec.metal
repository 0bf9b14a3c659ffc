// certain: thread_index_in_simdgroup as vector (MSL specification 5.2.3, attributes of compute functions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], uint2 i [[thread_index_in_simdgroup]]) { o[i.x] = 1; }  // HERE
