// certain: max(float, 0.0) literal is float (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* n [[buffer(0)]]) { n[0] = max(n[1], 0.0) + min(1.0, n[0]) + pow(n[0], 2.0); }
