// certain: swizzle out of range (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float2* o [[buffer(0)]]) { o[0].z = 1; }  // HERE
