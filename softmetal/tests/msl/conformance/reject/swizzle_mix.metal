// certain: swizzle mixing xyzw and rgba (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* o [[buffer(0)]]) { o[0].xy = o[1].xg; }  // HERE
