// certain: by-value parameter qualified device (MSL specification 4.4, threadgroup memory)
#include <metal_stdlib>
using namespace metal;
float f(device float x) { return x; }  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = f(1); }
