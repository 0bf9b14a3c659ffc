// certain: implicit float to bfloat (MSL specification 2.1, 2.18, scalars and their conversions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* o [[buffer(0)]], device float* x [[buffer(1)]]) { o[0] = x[0]; }  // HERE
