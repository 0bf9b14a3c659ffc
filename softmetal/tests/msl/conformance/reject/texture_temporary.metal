// likely: a texture made of nothing
#include <metal_stdlib>
using namespace metal;
float4 f(texture2d<float> t) { return t.read(uint2(0)); }
kernel void k(device float4* o [[buffer(0)]]) {
  o[0] = f(texture2d<float>()); }  // HERE
