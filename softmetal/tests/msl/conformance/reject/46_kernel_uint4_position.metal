// certain: thread_position_in_grid has at most 3 components
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]], uint4 i [[thread_position_in_grid]]) { x[i.x]=1; }  // HERE
