// certain: references to arrays in spaces (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
template <int N>
float s(thread const float (&a)[N]) {
  float t = 0;
  for (int i = 0; i < N; i++) t += a[i];
  return t;
}
float d(device float (*m)[4], int i) { return m[i][2]; }
kernel void k(device float* o [[buffer(0)]]) {
  float a[3] = {1, 2, 3};
  device float(*m)[4] = (device float(*)[4])o;
  o[0] = s(a) + d(m, 1);
  thread auto& r = a;
  r[0] = 1;
  device auto& q = o[1];
  q = r[0];
}
