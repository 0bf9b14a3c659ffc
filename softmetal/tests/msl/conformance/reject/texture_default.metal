// likely: a texture without a value
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* o [[buffer(0)]]) {
  texture2d<float> t;  // HERE
  o[0] = t.read(uint2(0)); }
