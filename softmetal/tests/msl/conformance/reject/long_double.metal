// certain: a long double literal: the type does not exist (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) { o[0] = 1e3L; }  // HERE
