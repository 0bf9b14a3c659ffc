// certain: packed vectors load and index (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device packed_float3* p [[buffer(0)]], device packed_half4* h [[buffer(1)]]) {
  float3 a = p[0];
  p[1] = a * 2;
  p[2][1] = 3;
  half4 b = h[0];
  h[1] = b;
  h[2].x = 1;
  p[3] = packed_float3(1, 2, 3);
  a = float3(p[1]) + p[2];
  p[4] = a;
}
