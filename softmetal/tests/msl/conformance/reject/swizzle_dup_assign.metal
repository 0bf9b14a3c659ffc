// certain: duplicate component in an assigned swizzle (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* o [[buffer(0)]]) { o[0].xx = float2(1); }  // HERE
