// certain: if (float4 == float4) needs all()/any()
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* x [[buffer(0)]]) { if (x[0]==x[1]) x[0]=1; }  // HERE
