// likely: a position in the grid by pointer (MSL specification 5.2.3, attributes of compute functions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], device uint* i [[thread_position_in_grid]]) { o[0] = i[0]; }  // HERE
