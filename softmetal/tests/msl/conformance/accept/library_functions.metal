// certain: library functions as shipped kernels call them (MSL specification 6, overloads of metal_math and metal_common)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], device half4* h [[buffer(1)]], device int* n [[buffer(2)]]) {
  float x = o[0], c;
  float s = sincos(x, c);
  int e;
  float fr = frexp(x, e);
  o[0] = clamp(x, 0.0f, 1.0f) + mix(x, 2.0f, 0.5f) + step(0.0f, x) + sign(x) + fract(x) + rsqrt(x) +
         saturate(x) + fma(x, x, x) + exp2(x) + powr(x, 2.0f) + ldexp(x, 2) + atan2(x, x) + round(x) +
         copysign(x, -1.0f) + s + c + fr + e;
  h[0] = max(h[1], 0.0h) + exp(h[2]) * dot(h[1], h[2]) + clamp(h[0], 0.0h, 1.0h) + normalize(h[1]) +
         fmax(h[0], h[1]);
  n[0] = min(n[1], 3) + abs(n[2]) + clz(n[3]) + ctz(n[4]) + popcount(n[5]) + mulhi(n[1], n[2]) +
         rotate(n[1], 3) + extract_bits(uint(n[2]), 2, 3) + reverse_bits(n[1]) + max3(n[0], n[1], n[2]) +
         madsat(n[0], n[1], n[2]) + isnan(x) + isinf(x) + signbit(x);
}
