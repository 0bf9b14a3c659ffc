// certain: address of a swizzle element (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
void f(device float2* p) { *p = 1; }
kernel void k(device float4* o [[buffer(0)]]) { f(&o[0].xy); }  // HERE
