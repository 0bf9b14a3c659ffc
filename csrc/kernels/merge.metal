// Merge: partial results over disjoint keys -> the result over all of them, by log-sum-exp. One threadgroup
// per row; its simdgroups share out the parts.
//
// Serves the second pass of decode (float32 partials) and fattn::merge.
#include <metal_stdlib>

#include "params.h"

using namespace metal;

namespace fattn {

typedef FATTN_T Partial;
typedef FATTN_OUT_T Result;

FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;
FATTN_CONSTEXPR int kLaneColumns = kMergeColumns / kSimdWidth;

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_merge(
    const device Partial* partial_out [[buffer(fattn::kSlotPartialOut)]],
    const device float* partial_lse [[buffer(fattn::kSlotPartialLse)]],
    device Result* out [[buffer(fattn::kSlotOut)]], device float* lse [[buffer(fattn::kSlotLse)]],
    constant MergeParams& params [[buffer(fattn::kSlotParams)]], uint group [[threadgroup_position_in_grid]],
    ushort simdgroup_index [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float shared[kSimdgroups * kMergeColumns];

  const long row = group;
  float largest = -INFINITY;
  for (int part = lane; part < params.parts; part += kSimdWidth) {
    largest = fmax(largest, partial_lse[part * params.rows + row]);
  }
  largest = simd_max(largest);
  const float origin = largest == -INFINITY ? 0.0f : largest;
  float total = 0.0f;
  for (int part = lane; part < params.parts; part += kSimdWidth) {
    total += fast::exp2((partial_lse[part * params.rows + row] - origin) * M_LOG2E_F);
  }
  total = simd_sum(total);
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;

  for (int first_column = 0; first_column < params.head_dim; first_column += kMergeColumns) {
    float weighted[kLaneColumns] = {};
#pragma clang loop unroll_count(4)
    for (int part = simdgroup_index; part < params.parts; part += kSimdgroups) {
      const float part_lse = partial_lse[part * params.rows + row];
      const float weight = fast::exp2((part_lse - origin) * M_LOG2E_F);
      const device Partial* source = partial_out + (part * params.rows + row) * params.head_dim;
#pragma clang loop unroll(full)
      for (int i = 0; i < kLaneColumns; i++) {
        const int column = first_column + i * kSimdWidth + lane;
        const float value = column < params.head_dim ? float(source[column]) : 0.0f;
        // A part that saw no key may hold anything.
        weighted[i] += part_lse == -INFINITY ? 0.0f : weight * value;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous columns have been read
#pragma clang loop unroll(full)
    for (int i = 0; i < kLaneColumns; i++) {
      shared[simdgroup_index * kMergeColumns + i * kSimdWidth + lane] = weighted[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = thread_index; i < kMergeColumns && first_column + i < params.head_dim; i += kThreads) {
      float sum = 0.0f;
      for (int s = 0; s < kSimdgroups; s++) {
        sum += shared[s * kMergeColumns + i];
      }
      out[row * params.head_dim + first_column + i] = Result(sum * inverse);
    }
  }
  if (thread_index == 0) {
    lse[row] = total == 0.0f ? -INFINITY : largest + log(total);
  }
}
