// certain: implicit half to bfloat (MSL specification 2.1, 2.18, scalars and their conversions)
#include <metal_stdlib>
using namespace metal;
bfloat f(half h) { return h; }  // HERE
kernel void k(device bfloat* o [[buffer(0)]], device half* x [[buffer(1)]]) { o[0] = f(x[0]); }
