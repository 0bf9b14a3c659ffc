// certain: vector constructors and swizzles (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* o [[buffer(0)]], device half4* x [[buffer(1)]]) {
  float2 a = {1, 2};
  float3 b(a, 3);
  float4 c = float4(b.zyx, 1);
  c.xy = a;
  c.zw += b.xy;
  c = c.wzyx;
  float4 d = (float4)x[0];
  half4 e = half4(c);
  float s = d[2];
  d[3] = s;
  d = 2;
  d = 1 + d * 2;
  int4 n = int4(d);
  uint4 u = uint4(n);
  vec<float, 4> v = d;
  c.rgb = b;
  o[0] = c + d * float4(u) + v + float4(e) + float4(a, a) + float4(1, b) + float4(1, a, 2);
  x[1].x = 1;
}
