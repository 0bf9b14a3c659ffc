// certain: float2(1,2,3) has too many components
#include <metal_stdlib>
using namespace metal;
kernel void k(device float2* x [[buffer(0)]]) { x[0]=float2(1.0f,2.0f,3.0f); }  // HERE
