// certain: samplers are constexpr, at program scope too, or parameters (MSL specification 2.10)
#include <metal_stdlib>
using namespace metal;
constexpr sampler linear(coord::normalized, filter::linear);
constexpr constant sampler nearest(filter::nearest);
struct Bound { texture2d<float> t [[id(0)]]; sampler s [[id(1)]]; array<texture2d<float>, 4> more [[id(2)]]; device float* p [[id(6)]]; };
float4 f(texture2d<float> t, sampler s) { return t.sample(s, float2(0)); }
kernel void k(texture2d<float> t [[texture(0)]], sampler given [[sampler(0)]], device float4* o [[buffer(0)]]) {
  constexpr sampler own(address::repeat);
  texture2d<float> same = t;
  o[0] = f(t, own) + f(same, given) + f(t, linear) + f(t, nearest);
}
