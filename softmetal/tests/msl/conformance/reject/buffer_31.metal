// certain: buffer index above 30 (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(31)]]) { o[0] = 1; }  // HERE
