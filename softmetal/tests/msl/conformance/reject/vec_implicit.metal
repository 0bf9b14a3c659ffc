// certain: float4 to half4 implicit (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device half4* o [[buffer(0)]], device float4* x [[buffer(1)]]) { o[0] = x[0]; }  // HERE
