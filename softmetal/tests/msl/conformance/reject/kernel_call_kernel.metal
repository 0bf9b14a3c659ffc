// certain: kernel calls kernel (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
kernel void a(device float* o [[buffer(0)]]) { o[0] = 1; }
kernel void k(device float* o [[buffer(0)]]) { a(o); }  // HERE
