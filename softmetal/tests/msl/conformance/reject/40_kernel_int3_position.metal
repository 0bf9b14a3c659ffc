// certain: thread_position_in_grid must be ushort/uint (vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]], int3 i [[thread_position_in_grid]]) { x[i.x]=1; }  // HERE
