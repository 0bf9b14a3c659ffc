// certain: a kernel parameter by value without attribute (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], float s) { o[0] = s; }  // HERE
