// certain: thread still means thread at 4.1 (MSL 4.1: the generic address space)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
float f(thread const float* p) { return p[0]; }
kernel void k(device float* o [[buffer(0)]]) { o[1] = f(o); }  // HERE
