// certain: xyzw mixed with rgba
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* x [[buffer(0)]]) { x[0].xy=x[0].xg; }  // HERE
