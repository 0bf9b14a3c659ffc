// certain: at 4.0 pointers need a space (MSL specification 4, pointers name their address space)
// std: metal4.0
#include <metal_stdlib>
using namespace metal;
float f(const float* p) { return p[0]; }  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = 1; }
