// Merges partial results over disjoint keys (part_sum.h). A threadgroup takes one row; each simdgroup sums
// every kSimdgroups-th part, and then their sums are added.
//
// Runs as fattn::merge, and as the last pass of decode and of a prefill whose keys are cut into parts
// (float32 partial results).
#include "../common/out_rows.h"
#include "../common/part_sum.h"
#include "../common/schedule.h"

namespace fattn {

typedef FATTN_T Partial;
typedef FATTN_OUT_T Result;

FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;

static_assert(sizeof(RowSum) == kMergeSumFloats * sizeof(float), "as the plan counts threadgroup memory");

// The sum of some parts of a row.
struct PartSum {
  float4 weighted;  // this lane's columns
  RowSum keys;
};

inline RowSum row_sum_at(const threadgroup RowSum* shared) {
  RowSum sum;
  sum.score = shared->score;
  sum.logit = shared->logit;
  sum.sum = shared->sum;
  return sum;
}

// The parts of a row, from this lane's columns on.
struct Parts {
  const device Partial* out;
  const device float* sum;  // RowSum::of_part(), or the log-sum-exp
  long out_stride;          // from part to part
  long sum_stride;
  float log2_per_score;  // a weight is 2^(score * log2_per_score), in all parts
  int count;
  int columns;  // of this lane, up to 4

  RowSum sum_of(int part) const thread {
    RowSum keys;
    if (fc_split) {
      const float4 stored = *reinterpret_cast<const device float4*>(sum + part * sum_stride);
      keys.score = stored.x;
      keys.logit = stored.y;
      keys.sum = stored.z;
    } else {
      keys.score = keys.logit = sum[part * sum_stride];
      keys.sum = keys.score == -INFINITY ? 0.0f : keys.score < INFINITY ? 1.0f : NAN;
    }
    return keys;
  }

  float4 values(int part) const thread {
    const device Partial* from = out + part * out_stride;
    float4 values = 0.0f;
    FATTN_UNROLL
    for (int i = 0; i < 4; i++) {
      if (i < columns) {
        values[i] = float(from[i]);
      }
    }
    return values;
  }
};

// Sums the parts of this simdgroup; the logit only if `with_logit` is set.
inline PartSum sum_of(thread const Parts& parts, bool with_logit, int simdgroup_index, ushort lane) {
  PartSum sum = {float4(0.0f), row_sum_of_no_keys()};
  for (int first = simdgroup_index; first < parts.count; first += kSimdgroups * kSimdWidth) {
    const int own_part = first + lane * kSimdgroups;  // one part per lane
    const RowSum own = own_part < parts.count ? parts.sum_of(own_part) : row_sum_of_no_keys();
    const LaneParts lanes = add_lanes(sum.keys, own, with_logit, parts.log2_per_score);
    sum.weighted *= lanes.shrink;
    // Stops after the last part that saw a key: later parts may never have been written.
    const int count = simd_max(own.sum != 0.0f ? int(lane) + 1 : 0);
#pragma clang loop unroll_count(4)
    for (int i = 0; i < count; i++) {
      const float4 values = parts.values(first + i * kSimdgroups);
      const bool counts = simd_shuffle(own.sum, ushort(i)) != 0.0f;
      const float weight = simd_shuffle(lanes.weight, ushort(i));
      sum.weighted += weighted_values(counts, weight, values);
    }
  }
  return sum;
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_merge(
    const device Partial* partial_out [[buffer(fattn::kSlotPartialOut)]],
    const device float* partial_sum [[buffer(fattn::kSlotPartialSum)]],
    device Result* out [[buffer(fattn::kSlotOut)]], device float* lse [[buffer(fattn::kSlotLse)]],
    device Result* out_remainder [[buffer(fattn::kSlotOutRemainder), function_constant(fc_out_remainder)]],
    constant MergeParams& params [[buffer(fattn::kSlotParams)]],
    const device int* seq_lens [[buffer(fattn::kSlotSeqLens), function_constant(fc_has_seq_lens)]],
    uint group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 shared_weighted[kSimdgroups * kSimdWidth];
  threadgroup RowSum shared_keys[kSimdgroups];

  const long row = group;
  Parts parts;
  const long sum_floats = fc_split ? kSumFloats : 1;
  parts.sum_stride = sum_floats * params.rows;
  parts.sum = partial_sum + sum_floats * row;
  parts.log2_per_score = fc_split ? parts.sum[kSumFloats - 1] : M_LOG2E_F;
  parts.out_stride = params.rows * params.head_dim;
  parts.count = params.parts;
  if (params.span.chunk_unit > 0) {  // decode: as many as the sequence has chunks
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
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous columns have been read
    const PartSum sum = sum_of(parts, first_column == 0, simdgroup_index, lane);
    shared_weighted[simdgroup_index * kSimdWidth + lane] = sum.weighted;
    if (lane == 0) {
      shared_keys[simdgroup_index] = sum.keys;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup_index != 0) {
      continue;
    }
    RowSum keys = row_sum_of_no_keys();
    for (int s = 0; s < kSimdgroups; s++) {
      raise_to(keys, row_sum_at(shared_keys + s));
    }
    float4 weighted = 0.0f;
    for (int s = 0; s < kSimdgroups; s++) {
      const float weight = add_sum(keys, row_sum_at(shared_keys + s), parts.log2_per_score);
      weighted += weight * shared_weighted[s * kSimdWidth + lane];
    }
    const float scale = params.puts_part ? 1.0f : keys.sum == 0.0f ? 0.0f : 1.0f / keys.sum;
    FATTN_UNROLL
    for (int i = 0; i < 4; i++) {  // a constant bound: dynamic indexing would spill
      if (i < parts.columns) {
        const float result = weighted[i] * scale;
        out[out_begin + column + i] = Result(result);
        if (fc_out_remainder) {
          out_remainder[out_begin + column + i] = remainder_of<Result>(result);
        }
      }
    }
    if (first_column == 0 && lane == 0) {
      if (params.puts_part) {
        *reinterpret_cast<device float4*>(lse + kSumFloats * row) = keys.of_part(parts.log2_per_score);
      } else {
        lse[row] = keys.log_sum_exp();
      }
    }
  }
}
