// certain: kernel parameter in thread memory (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
kernel void k(thread float* o [[buffer(0)]]) { o[0] = 1; }  // HERE
