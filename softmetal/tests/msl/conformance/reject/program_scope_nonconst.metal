// certain: program-scope variable must be constant (MSL specification 4.3, constant memory)
#include <metal_stdlib>
using namespace metal;
float table[2] = {1, 2};  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = table[0]; }
