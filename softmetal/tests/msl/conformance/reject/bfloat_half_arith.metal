// likely: bfloat and half have no common type (MSL specification 2.1, 2.18, scalars and their conversions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* o [[buffer(0)]], device half* h [[buffer(1)]]) { o[0] = o[1] + h[0]; }  // HERE
