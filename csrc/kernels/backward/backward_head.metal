// The gradients of learned sinks or ALiBi slopes: a threadgroup sums RowState, written by backward_query,
// over the rows of a head, in one sequence or in all. fc_sinks selects sinks, otherwise slopes.
#include "row_state.h"
#include "../common/mask.h"

namespace fattn {

typedef FATTN_T Element;

FATTN_CONSTEXPR int kSimdgroups = FATTN_SIMDGROUPS;
FATTN_CONSTEXPR int kThreads = kSimdgroups * kSimdWidth;

// The term of a row. A sink is a logit without a value: its gradient is its weight times -delta.
inline float term_of(RowState row, float sink) {
  if (!fc_sinks) {
    return row.slope_grad;
  }
  if (row.lse == INFINITY) {  // no key has a weight
    return sink == -INFINITY ? 0.0f : -row.delta;
  }
  return -weight_of(sink - row.lse) * row.inverse * row.delta;
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_backward_head(
    const device float4* row_states [[buffer(fattn::kSlotRowStates)]],
    const device uchar* sinks [[buffer(fattn::kSlotSinks), function_constant(fc_sinks)]],
    const device int* cu_seqlens_q [[buffer(fattn::kSlotCuSeqlens), function_constant(fc_packed)]],
    device Element* grad [[buffer(fattn::kSlotOut)]],
    constant BackwardHeadParams& params [[buffer(fattn::kSlotParams)]],
    uint group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared_sums[kSimdgroups];
  const int head = int(group % uint(params.q_heads));
  const int sequence = int(group / uint(params.q_heads));
  int begin = 0;
  int end = params.q_len;
  if (fc_packed) {
    begin = clamp(cu_seqlens_q[sequence * params.cu_seqlens_stride], 0, params.q_len);
    end = clamp(cu_seqlens_q[(sequence + 1) * params.cu_seqlens_stride], begin, params.q_len);
  }
  const float sink = fc_sinks ? sink_score(float_at(sinks, head * params.sinks_stride, fc_sinks_kind)) : 0.0f;

  // Every thread adds in a fixed order.
  float sum = 0.0f;
  for (int i = 0; i < params.sequences; i++) {
    const long of_sequence = fc_packed ? 0 : sequence + i;
    const long first = (of_sequence * params.q_heads + head) * params.q_len;
    for (int row = begin + simdgroup_index * kSimdWidth + lane; row < end; row += kThreads) {
      sum += term_of(row_state_of(row_states[first + row]), sink);
    }
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    shared_sums[simdgroup_index] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup_index == 0 && lane == 0) {
    float total = 0.0f;
    for (int s = 0; s < kSimdgroups; s++) {
      total += shared_sums[s];
    }
    grad[group] = Element(total);
  }
}
