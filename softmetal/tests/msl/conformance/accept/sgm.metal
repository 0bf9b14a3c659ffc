// certain: simdgroup matrices (MSL specification 2.3.2, 6.7, simdgroup matrices; llama.cpp, MLX steel)
#include <metal_stdlib>
using namespace metal;
#include <metal_simdgroup_matrix>
kernel void k(device half* a [[buffer(0)]], device float* o [[buffer(1)]]) {
  threadgroup half t[64];
  simdgroup_half8x8 x, y;
  simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8>(0.0f);
  simdgroup_matrix<float, 8, 8> d(1.0f);
  simdgroup_load(x, a, 8);
  simdgroup_load(y, a, 8, ulong2(0, 0), true);
  simdgroup_store(x, t, 8);
  simdgroup_multiply_accumulate(c, x, y, c);
  simdgroup_multiply(d, x, y);
  c.thread_elements()[0] *= 2.0f;
  simdgroup_store(c, o, 8, ulong2(0, 0));
  simdgroup_bfloat8x8 b;
  (void)b;
}
