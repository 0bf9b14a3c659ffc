// certain: keyword thread as a name (MSL specification, keywords; crosstl #1140)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], uint thread [[thread_position_in_grid]]) { o[0] = 1; }  // HERE
