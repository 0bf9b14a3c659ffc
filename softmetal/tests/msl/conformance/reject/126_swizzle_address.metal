// certain: address of a swizzle
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* x [[buffer(0)]]) { device float* p=&x[0].y; p[0]=1; }  // HERE
