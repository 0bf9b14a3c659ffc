// Merge: partial results over disjoint keys -> the result over all of them, by log-sum-exp. A threadgroup has
// 32 columns of a row; its simdgroups share out the parts.
//
// Serves the second pass of decode (float32 partials) and fattn::merge.
#include "schedule.h"

namespace fattn {

typedef FATTN_T Partial;
typedef FATTN_OUT_T Result;

FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_merge(
    const device Partial* partial_out [[buffer(fattn::kSlotPartialOut)]],
    const device float* partial_lse [[buffer(fattn::kSlotPartialLse)]],
    device Result* out [[buffer(fattn::kSlotOut)]], device float* lse [[buffer(fattn::kSlotLse)]],
    constant MergeParams& params [[buffer(fattn::kSlotParams)]],
    const device int* seq_lens [[buffer(fattn::kSlotSeqLens), function_constant(fc_has_seq_lens)]],
    uint2 group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared[kSimdgroups * kSimdWidth];

  const long row = group.x;
  int parts = params.parts;
  if (fc_split) {  // of decode: as many as the sequence has chunks
    const int length = length_of(seq_lens, params.span, int(row / params.rows_per_sequence));
    parts = chunks_of(newest_rows(params.span, length), params.span).count();
  }
  float largest = -INFINITY;
#pragma clang loop unroll_count(8)
  for (int part = lane; part < parts; part += kSimdWidth) {
    largest = fmax(largest, partial_lse[part * params.rows + row]);
  }
  largest = simd_max(largest);
  const float origin = largest == -INFINITY ? 0.0f : largest;
  float total = 0.0f;
#pragma clang loop unroll_count(8)
  for (int part = lane; part < parts; part += kSimdWidth) {
    total += fast::exp2((partial_lse[part * params.rows + row] - origin) * M_LOG2E_F);
  }
  total = simd_sum(total);

  const int column = int(group.y) * kSimdWidth + lane;
  float weighted = 0.0f;
  if (column < params.head_dim) {
#pragma clang loop unroll_count(8)
    for (int part = simdgroup_index; part < parts; part += kSimdgroups) {
      const float part_lse = partial_lse[part * params.rows + row];
      const float weight = fast::exp2((part_lse - origin) * M_LOG2E_F);
      const float value = float(partial_out[(part * params.rows + row) * params.head_dim + column]);
      // A part that saw no key may hold anything.
      weighted += part_lse == -INFINITY ? 0.0f : weight * value;
    }
  }
  shared[simdgroup_index * kSimdWidth + lane] = weighted;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup_index == 0 && column < params.head_dim) {
    float sum = 0.0f;
    for (int s = 0; s < kSimdgroups; s++) {
      sum += shared[s * kSimdWidth + lane];
    }
    out[row * params.head_dim + column] = Result(total == 0.0f ? 0.0f : sum / total);
  }
  if (simdgroup_index == 0 && group.y == 0 && lane == 0) {
    lse[row] = total == 0.0f ? -INFINITY : largest + log(total);
  }
}
