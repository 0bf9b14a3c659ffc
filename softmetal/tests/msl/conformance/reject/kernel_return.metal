// certain: a kernel returns void (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
kernel float k(device float* o [[buffer(0)]]) { return o[0]; }  // HERE
