// Merge: partial results over disjoint keys -> the result over all of them, by log-sum-exp. A threadgroup has
// a row; each of its simdgroups sums every kSimdgroups-th part, and then their sums are added up.
//
// Serves the last pass of decode and of a prefill whose keys are cut into parts (float32 partials), and
// fattn::merge.
#include "out_rows.h"
#include "schedule.h"

namespace fattn {

typedef FATTN_T Partial;
typedef FATTN_OUT_T Result;

FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;

// The sum of some parts of a row, relative to their largest lse.
struct PartSum {
  float4 weighted;  // of this lane's columns
  float largest;
  float total;
};

// Where the parts of a row lie, from this lane's columns on.
struct Parts {
  const device Partial* out;
  const device float* lse;
  long out_stride;  // from part to part
  long lse_stride;
  int count;
  int columns;  // that this lane has: up to 4

  float4 values(int part) const thread {
    const device Partial* from = out + part * out_stride;
    float4 values = 0.0f;
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; i++) {
      if (i < columns) {
        values[i] = float(from[i]);
      }
    }
    return values;
  }
};

// Of the parts that this simdgroup has.
inline PartSum sum_of(thread const Parts& parts, int simdgroup_index, ushort lane) {
  PartSum sum = {float4(0.0f), -INFINITY, 0.0f};
  for (int first = simdgroup_index; first < parts.count; first += kSimdgroups * kSimdWidth) {
    const int own = first + lane * kSimdgroups;  // a lane weighs one part
    const float lse = own < parts.count ? parts.lse[own * parts.lse_stride] : -INFINITY;
    const float largest = fmax(sum.largest, simd_max(lse));
    const float origin = largest == -INFINITY ? 0.0f : largest;
    const float weight = fast::exp2((lse - origin) * M_LOG2E_F);
    const float shrink = fast::exp2((sum.largest - origin) * M_LOG2E_F);
    sum.largest = largest;
    sum.total = sum.total * shrink + simd_sum(weight);
    sum.weighted *= shrink;
    // Up to the last part that saw a key: those behind it may be parts that nobody had to write.
    const int count = simd_max(lse != -INFINITY ? int(lane) + 1 : 0);
#pragma clang loop unroll_count(4)
    for (int i = 0; i < count; i++) {
      const float4 values = parts.values(first + i * kSimdgroups);
      const bool counts = simd_shuffle(lse, ushort(i)) != -INFINITY;
      const float part_weight = simd_shuffle(weight, ushort(i));
      // A part that saw no key may hold anything.
      sum.weighted += counts ? part_weight * values : float4(0.0f);
    }
  }
  return sum;
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_merge(
    const device Partial* partial_out [[buffer(fattn::kSlotPartialOut)]],
    const device float* partial_lse [[buffer(fattn::kSlotPartialLse)]],
    device Result* out [[buffer(fattn::kSlotOut)]], device float* lse [[buffer(fattn::kSlotLse)]],
    constant MergeParams& params [[buffer(fattn::kSlotParams)]],
    const device int* seq_lens [[buffer(fattn::kSlotSeqLens), function_constant(fc_has_seq_lens)]],
    uint group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 shared_weighted[kSimdgroups * kSimdWidth];
  threadgroup float shared_largest[kSimdgroups];
  threadgroup float shared_total[kSimdgroups];

  const long row = group;
  Parts parts;
  parts.lse = partial_lse + row;
  parts.lse_stride = params.rows;
  parts.out_stride = params.rows * params.head_dim;
  parts.count = params.parts;
  if (fc_split) {  // of decode: as many as the sequence has chunks
    const int length = length_of(seq_lens, params.span, int(row / params.rows_per_sequence));
    const Chunks chunks = chunks_of(newest_rows(params.span, length), params.span);
    parts.count = chunks.count();
  }
  const long out_begin =
      long(out_row(group, params.span.q_len, uint(params.rows_per_sequence))) * params.head_dim;
  for (int first_column = 0; first_column < params.head_dim; first_column += kMergeColumns) {
    const int column = first_column + lane * 4;
    parts.out = partial_out + row * params.head_dim + column;
    parts.columns = params.head_dim - column;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the columns before have been read
    const PartSum sum = sum_of(parts, simdgroup_index, lane);
    shared_weighted[simdgroup_index * kSimdWidth + lane] = sum.weighted;
    if (lane == 0) {
      shared_largest[simdgroup_index] = sum.largest;
      shared_total[simdgroup_index] = sum.total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup_index != 0) {
      continue;
    }
    float largest = -INFINITY;
    for (int s = 0; s < kSimdgroups; s++) {
      largest = fmax(largest, shared_largest[s]);
    }
    const float origin = largest == -INFINITY ? 0.0f : largest;
    float4 weighted = 0.0f;
    float total = 0.0f;
    for (int s = 0; s < kSimdgroups; s++) {
      const float weight = fast::exp2((shared_largest[s] - origin) * M_LOG2E_F);
      weighted += weight * shared_weighted[s * kSimdWidth + lane];
      total += weight * shared_total[s];
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; i++) {  // not up to `columns`: registers have no addresses
      if (i < parts.columns) {
        out[out_begin + column + i] = Result(weighted[i] * inverse);
      }
    }
    if (first_column == 0 && lane == 0) {
      lse[row] = total == 0.0f ? -INFINITY : largest + log(total);
    }
  }
}
