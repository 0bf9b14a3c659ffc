// certain: float4 + half4 (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* o [[buffer(0)]], device half4* x [[buffer(1)]]) { o[0] = o[1] + x[0]; }  // HERE
