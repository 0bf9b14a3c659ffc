// certain: as_type forms (MSL specification 2.19, as_type)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* o [[buffer(0)]], device float4* x [[buffer(1)]]) {
  o[0] = as_type<uint>(x[0].x);
  half2 h = as_type<half2>(o[1]);
  o[2] = as_type<uint>(h);
  uint4 u = as_type<uint4>(x[1]);
  o[3] = u.x + as_type<ushort>(h.x) + as_type<uint2>(ulong(3)).y;
  char4 c = as_type<char4>(o[4]);
  o[5] = c.x;
}
