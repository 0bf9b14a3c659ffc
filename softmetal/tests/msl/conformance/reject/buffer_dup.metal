// certain: one buffer index twice (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(1)]], device float* p [[buffer(1)]]) { o[0] = p[0]; }  // HERE
