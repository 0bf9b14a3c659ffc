// certain: explicit bfloat conversions (MSL specification 2.1, 2.18, scalars and their conversions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* o [[buffer(0)]], device float* x [[buffer(1)]], device half* h [[buffer(2)]]) {
  o[0] = bfloat(x[0]);
  o[1] = static_cast<bfloat>(h[0]);
  o[2] = (bfloat)x[1];
  float f = o[3];
  o[4] = bfloat(f + o[1]);
  bfloat4 v = bfloat4(float4(1));
  float4 w = float4(v);
  o[5] = v.x;
  x[0] = w.x + f;
  h[1] = half(o[6]);
  bfloat s = 1.0bf;
  s += o[1];
  o[7] = s * o[2];
}
