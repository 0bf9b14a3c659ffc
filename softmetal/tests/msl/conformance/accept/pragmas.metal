// likely: pragmas and attributes of shipped kernels (MSL specification 1.5: C++14)
#include <metal_stdlib>
using namespace metal;
#pragma METAL internals : enable
#pragma clang diagnostic ignored "-Wunused"
inline __attribute__((always_inline)) float f(float x) { return x; }
[[gnu::always_inline]] static inline float g(float x) { return x; }
__attribute__((noinline)) float h(float x) { return x; }
METAL_FUNC float q(float x) { return x; }
kernel void k(device float* __restrict__ o [[buffer(0)]], volatile device uint* v [[buffer(1)]],
              device const float* restrict_ [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  [[maybe_unused]] int n = 1;
  _Pragma("clang loop unroll(full)") for (int j = 0; j < 4; j++) o[j] = f(g(h(q(j))));
#pragma unroll
  for (int j = 0; j < 4; j++) o[j] += restrict_[j];
#pragma clang loop unroll_count(2)
  for (int j = 0; j < 4; j++) v[j] = 1;
#pragma unroll(4)
  for (int j = 0; j < 4; j++) o[j] += 1;
  switch (i) {
    case 1:
      o[0] = 1;
      [[fallthrough]];
    default:
      break;
  }
}
