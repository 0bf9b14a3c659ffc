// likely: generic does not include constant (MSL specification 4.3, constant memory)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
float f(const float* p) { return p[0]; }
kernel void k(device float* o [[buffer(0)]], constant float* c [[buffer(1)]]) { o[0] = f(c); }  // HERE
