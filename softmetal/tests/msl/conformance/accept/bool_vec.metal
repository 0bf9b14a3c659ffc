// certain: bool vectors (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* o [[buffer(0)]]) {
  bool4 m = o[0] < o[1];
  bool4 n = m && !(o[2] == o[3]);
  bool any1 = any(n);
  bool4 z = m | n;
  float4 s = select(o[0], o[1], m);
  float4 t = m.x ? s : o[2];
  uint c = uint(m.y) + popcount(uint(z.x));
  o[0] = t + float4(n) + c + (all(m) ? 1 : 0) + any1;
}
