// certain: simdgroup functions (MSL specification 6.9, simdgroup functions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], ushort l [[thread_index_in_simdgroup]]) {
  float v = o[l];
  v = simd_sum(v) + simd_max(v) + simd_min(v) + simd_product(v) + simd_shuffle(v, l ^ 1) +
      simd_shuffle_xor(v, 2) + simd_shuffle_down(v, 1) + simd_shuffle_up(v, 1) + simd_broadcast(v, 0) +
      simd_broadcast_first(v) + simd_prefix_exclusive_sum(v) + simd_prefix_inclusive_sum(v);
  uint u = simd_and(uint(l)) + simd_or(uint(l)) + simd_xor(uint(l));
  bool b = simd_all(l > 1) || simd_any(l > 2) || simd_is_first();
  ulong m = static_cast<ulong>(static_cast<simd_vote::vote_t>(simd_ballot(l > 3)));
  half4 h = simd_sum(half4(v));
  v += quad_sum(v) + quad_shuffle_xor(v, 1) + quad_broadcast(v, 2);
  o[l] = v + u + b + m + h.x + simd_shuffle_and_fill_down(v, 1.0f, 1);
  simdgroup_barrier(mem_flags::mem_none);
}
