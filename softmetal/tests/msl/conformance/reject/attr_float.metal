// certain: float grid position (MSL specification 5.2.3, attributes of compute functions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], float i [[thread_position_in_grid]]) { o[0] = i; }  // HERE
