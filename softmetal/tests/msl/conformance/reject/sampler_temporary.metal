// likely: a temporary sampler
#include <metal_stdlib>
using namespace metal;
kernel void k(texture2d<float> t [[texture(0)]], device float4* o [[buffer(0)]]) {
  o[0] = t.sample(sampler(filter::linear), float2(0)); }  // HERE
