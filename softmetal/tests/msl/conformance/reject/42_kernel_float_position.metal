// certain: thread_position_in_grid cannot be float
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]], float i [[thread_position_in_grid]]) { x[int(i)]=1; }  // HERE
