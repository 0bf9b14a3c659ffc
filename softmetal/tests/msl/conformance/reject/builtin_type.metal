// certain: a built-in variable at program scope of a wrong type
#include <metal_stdlib>
using namespace metal;
int2 place [[thread_position_in_grid]];  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = place.x; }
