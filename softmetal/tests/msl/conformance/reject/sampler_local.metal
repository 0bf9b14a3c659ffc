// likely: a local sampler that is not constexpr (MSL specification 2.10)
#include <metal_stdlib>
using namespace metal;
kernel void k(texture2d<float> t [[texture(0)]], device float4* o [[buffer(0)]]) {
  sampler s(filter::linear);  // HERE
  o[0] = t.sample(s, float2(0)); }
