// certain: vertex and fragment functions beside kernels (MSL specification 5.1)
#include <metal_stdlib>
using namespace metal;
struct In { float3 position [[attribute(0)]]; float2 uv [[attribute(1)]]; };
struct Out { float4 position [[position]]; float2 uv [[user(uv)]]; float size [[point_size]]; };
struct Pixel { float4 color [[color(0)]]; float depth [[depth(any)]]; };
vertex Out v(In in [[stage_in]], constant float4x4& m [[buffer(1)]], uint id [[vertex_id]]) {
  Out out;
  out.position = m * float4(in.position, 1);
  out.uv = in.uv;
  return out;
}
fragment Pixel f(Out in [[stage_in]], texture2d<float> t [[texture(0)]], bool front [[front_facing]]) {
  constexpr sampler s(filter::linear);
  if (in.uv.x < 0) discard_fragment();
  return {t.sample(s, in.uv) + dfdx(in.uv.x), 0.5f};
}
[[vertex]] float4 g(uint id [[vertex_id]]);
[[fragment]] half4 h(float4 p [[position]]) { return half4(p); }
template <typename T> fragment T tf(float4 p [[position]]) { return T(p); }
template [[host_name("tf")]] fragment float4 tf<float4>(float4 p [[position]]);
kernel void k(device Out* o [[buffer(0)]], uint vertex_count [[thread_position_in_grid]]) { o[vertex_count].size = 1; }
