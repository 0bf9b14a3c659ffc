// <metal_quadgroup>: reductions, prefix operations and votes of four lanes. Inactive lanes are ignored.
#pragma once
#pragma clang system_header
#include "simdgroup.h"

namespace softmetal {
// Each lane's result from the values of its quad's active lanes.
template <class T, class Operation>
SOFTMETAL_UNCHECKED void quad_reduce(softmetal_simdgroup* group) {
  for (int first = 0; first < SOFTMETAL_SIMD_WIDTH; first += 4) {
    bool any = false;
    T total = T();
    for (int i = first; i < first + 4; ++i) {
      if (!is_active(group, i)) continue;
      total = any ? Operation::apply(total, operand<T>(group, i)) : operand<T>(group, i);
      any = true;
    }
    for (int i = first; i < first + 4; ++i) result<T>(group, i) = total;
  }
}
template <class T>
SOFTMETAL_UNCHECKED void quad_first(softmetal_simdgroup* group) {
  for (int i = SOFTMETAL_SIMD_WIDTH - 1; i >= 0; --i)
    if (is_active(group, i))
      for (int k = i / 4 * 4; k < i / 4 * 4 + 4; ++k) result<T>(group, k) = operand<T>(group, i);
}
SOFTMETAL_UNCHECKED inline void quad_votes(softmetal_simdgroup* group) {
  for (int first = 0; first < SOFTMETAL_SIMD_WIDTH; first += 4) {
    uint64_t votes = 0;
    for (int i = first; i < first + 4; ++i)
      if (is_active(group, i) && operand<uint64_t>(group, i)) votes |= uint64_t(1) << (i - first);
    for (int i = first; i < first + 4; ++i) result<uint64_t>(group, i) = votes;
  }
}
}  // namespace softmetal

namespace metal {
#define SOFTMETAL_QUAD(NAME, FUNCTION)                             \
  template <class T>                                               \
  SOFTMETAL_INLINE T NAME(T value, SOFTMETAL_LINE) {               \
    return softmetal::simd_operation<T>(value, 0, FUNCTION, line); \
  }
SOFTMETAL_QUAD(quad_sum, (softmetal::quad_reduce<T, softmetal::Sum>))
SOFTMETAL_QUAD(quad_product, (softmetal::quad_reduce<T, softmetal::Product>))
SOFTMETAL_QUAD(quad_max, (softmetal::quad_reduce<T, softmetal::Maximum>))
SOFTMETAL_QUAD(quad_min, (softmetal::quad_reduce<T, softmetal::Minimum>))
SOFTMETAL_QUAD(quad_and, (softmetal::quad_reduce<T, softmetal::And>))
SOFTMETAL_QUAD(quad_or, (softmetal::quad_reduce<T, softmetal::Or>))
SOFTMETAL_QUAD(quad_xor, (softmetal::quad_reduce<T, softmetal::Xor>))
SOFTMETAL_QUAD(quad_prefix_inclusive_sum, (softmetal::scan_sum<T, true, 4>))
SOFTMETAL_QUAD(quad_prefix_exclusive_sum, (softmetal::scan_sum<T, false, 4>))
SOFTMETAL_QUAD(quad_prefix_inclusive_product, (softmetal::scan_product<T, true, 4>))
SOFTMETAL_QUAD(quad_prefix_exclusive_product, (softmetal::scan_product<T, false, 4>))
SOFTMETAL_QUAD(quad_broadcast_first, (softmetal::quad_first<T>))
#undef SOFTMETAL_QUAD

struct quad_vote {
  using vote_t = ushort;
  vote_t votes;
  SOFTMETAL_INLINE explicit constexpr quad_vote(vote_t v = 0) : votes(v) {}
  SOFTMETAL_INLINE explicit constexpr operator vote_t() const { return votes; }
  SOFTMETAL_INLINE bool all() const { return votes == 0xf; }
  SOFTMETAL_INLINE bool any() const { return votes != 0; }
};
SOFTMETAL_INLINE quad_vote quad_ballot(bool vote, SOFTMETAL_LINE) {
  return quad_vote((ushort)softmetal::simd_operation<ulong>(vote, 0, softmetal::quad_votes, line));
}
SOFTMETAL_INLINE quad_vote quad_active_threads_mask(SOFTMETAL_LINE) { return quad_ballot(true, line); }
SOFTMETAL_INLINE bool quad_any(bool vote, SOFTMETAL_LINE) { return quad_ballot(vote, line).any(); }
SOFTMETAL_INLINE bool quad_all(bool vote, SOFTMETAL_LINE) { return !quad_ballot(!vote, line).any(); }
SOFTMETAL_INLINE bool quad_is_first(SOFTMETAL_LINE) {
  return __builtin_ctz((ushort)quad_active_threads_mask(line)) == softmetal_current_lane()->lane % 4;
}
}  // namespace metal
