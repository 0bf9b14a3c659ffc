// The second pass of gated_delta_rule: walks over the chunks of a sequence with the state in registers.
//
// A simdgroup per 8 columns of a state S. With what the first pass knows of a chunk (chunk.h), and without a
// barrier unless each channel has a decay:
//
//   delta = solve (V - K S),  O = Q S + scores delta,  S = decay S + K^T delta
//
// These are 3 Dk / 8 + 2 products of 8x8 matrices per chunk, with the factors of chunk.h on their rows.
#include "delta_params.h"

FATTN_DECLARE_CONSTANT(bool, vector_loads)
FATTN_DECLARE_CONSTANT(bool, packed)
FATTN_DECLARE_CONSTANT(bool, sliced)
FATTN_DECLARE_CONSTANT(bool, slots)
FATTN_DECLARE_CONSTANT(bool, raw_gates)
FATTN_DECLARE_CONSTANT(bool, has_state)
FATTN_DECLARE_CONSTANT(bool, writes_state)
FATTN_DECLARE_CONSTANT(bool, has_initial)

#include "../common/grid.h"
#include "chunk_operands.h"

namespace fattn {

typedef simdgroup_matrix<float, 8, 8> Fragment;

inline float2 elements_of(thread Fragment& of) {
  return float2(of.thread_elements()[0], of.thread_elements()[1]);
}

template <bool kByChannel>
struct OperandsOf {
  typedef KeyRows type;
};
template <>
struct OperandsOf<true> {
  typedef StagedKeys type;
};
typedef OperandsOf<kChannelDecay>::type Operands;

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_gated_delta_scan(
    const device Element* query [[buffer(fattn::kSlotQuery)]],
    const device Element* key [[buffer(fattn::kSlotKey)]],
    const device Element* value [[buffer(fattn::kSlotValue)]],
    const device Decay* decays [[buffer(fattn::kBufferDecay)]],
    const device ALog* a_log [[buffer(fattn::kBufferALog), function_constant(fc_raw_gates)]],
    const device DtBias* dt_bias [[buffer(fattn::kBufferDtBias), function_constant(fc_raw_gates)]],
    const device float* chunks [[buffer(fattn::kBufferChunks)]],
    device float* states [[buffer(fattn::kBufferState), function_constant(fc_has_state)]],
    const device bool* initial [[buffer(fattn::kBufferHasInitial), function_constant(fc_has_initial)]],
    const device int* slots [[buffer(fattn::kBufferStateSlots), function_constant(fc_slots)]],
    const device int* cu_seqlens [[buffer(fattn::kBufferSeqlens), function_constant(fc_packed)]],
    device Element* out [[buffer(fattn::kSlotOut)]],
    constant GatedDeltaParams& params [[buffer(fattn::kSlotParams)]],
    constant GridSlice& slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]],
    uint3 dispatched [[threadgroup_position_in_grid]],
    ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort thread_index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float staged[kStagedFloats];

  const uint3 group = group_in_grid(dispatched, slice);
  const int number = group.z, value_head = group.y;
  const int value_heads = params.key_heads * params.group_size;
  const LanePosition at = lane_position(lane);
  const int column = (group.x * kSimdgroups + simdgroup_index) * kFragment + 2 * at.pair;

  const Sequence sequence = sequence_at(number, cu_seqlens, params.length);
  const int state_index = fc_slots ? slots[number] : number;
  const bool kept = !fc_slots || uint(state_index) < uint(params.states);
  const int end = kept ? sequence.length : 0;
  const int head = value_head / params.group_size, member = value_head % params.group_size;
  ChunkInputs inputs = {};
  inputs.query = tokens_from(query, params.query, sequence, 0, head, 0);
  inputs.key = tokens_from(key, params.key, sequence, 0, head, 0);
  inputs.decay = tokens_from(decays, params.decay, sequence, 0, head, 0);
  if (fc_raw_gates) {
    inputs.a_log = a_log + head;
    inputs.dt_bias = dt_bias + head * kHeadDim;
  }
  inputs.chunk =
      chunks + (long(first_piece(sequence, kDeltaChunk, params.length)) * value_heads + value_head) *
                   kDeltaChunkFloats;
  const device Element* values = tokens_from(value, params.value, sequence, 0, head, member) + column;

  device float* columns = nullptr;  // of the state
  if (fc_has_state && kept) {
    columns = states + state_index * params.state + long(value_head) * (kHeadDim * kValueDim) + column;
  }
  const bool begins = fc_has_state && kept && (!fc_has_initial || initial[number]);
  Fragment state[kRuns];
  FATTN_UNROLL
  for (int f = 0; f < kRuns; f++) {
    set_elements(state[f], 0.0f, 0.0f);
    if (begins) {
      const device float* from = columns + Operands::state_row(f, at) * kValueDim;
      set_elements(state[f], from[0], from[1]);
    }
  }

  device Element* target =
      out + (token_index(sequence, at.row, params.length) * value_heads + value_head) * kValueDim + column;
  const long row_step = long(value_heads) * kValueDim * kDeltaChunk;
  Operands operands;
  for (int left = end; left > 0; left -= kDeltaChunk) {
    inputs.last = min(kDeltaChunk, left) - 1;
    operands.begin(inputs, params, staged, at, thread_index);

    Fragment from_keys, from_queries;
    set_elements(from_keys, 0.0f, 0.0f);
    set_elements(from_queries, 0.0f, 0.0f);
    FATTN_UNROLL
    for (int f = 0; f < kRuns; f += kRun) {
      RunPair of_key, of_query;
      operands.read(f, of_key, of_query);
      FATTN_UNROLL
      for (int u = 0; u < kRun; u++) {
        Fragment operand;
        set_elements(operand, of_key.first[u], of_key.second[u]);
        simdgroup_multiply_accumulate(from_keys, operand, state[f + u], from_keys);
        set_elements(operand, of_query.first[u], of_query.second[u]);
        simdgroup_multiply_accumulate(from_queries, operand, state[f + u], from_queries);
      }
    }

    const device float* chunk = inputs.chunk;
    const device Element* value_row = values + min(int(at.row), inputs.last) * int(params.value.token);
    const float key_factor = kChannelDecay ? 1.0f : chunk[kKeyAt + at.row];
    const float query_factor = kChannelDecay ? 1.0f : chunk[kQueryAt + at.row];
    const float update_factor = kChannelDecay ? 1.0f : chunk[kUpdateAt + at.row];
    const float2 rest =
        float2(float(value_row[0]), float(value_row[1])) - key_factor * elements_of(from_keys);
    const float2 asked = query_factor * elements_of(from_queries);
    const device float* elements = chunk + at.row * kFragment + 2 * at.pair;
    Fragment matrix, rhs, delta, result;
    set_elements(matrix, elements[kSolveAt], elements[kSolveAt + 1]);
    set_elements(rhs, rest.x, rest.y);
    simdgroup_multiply(delta, matrix, rhs);
    set_elements(matrix, elements[kScoresAt], elements[kScoresAt + 1]);
    set_elements(result, asked.x, asked.y);
    simdgroup_multiply_accumulate(result, matrix, delta, result);
    if (at.row <= inputs.last) {
      target[0] = Element(result.thread_elements()[0]);
      target[1] = Element(result.thread_elements()[1]);
    }

    const float2 update = update_factor * elements_of(delta);
    set_elements(delta, update.x, update.y);
    FATTN_UNROLL
    for (int f = 0; f < kRuns; f += kRun) {
      RunPair of_key;
      float of_rows[kRun];
      operands.read_update(f, of_key, of_rows);
      FATTN_UNROLL
      for (int u = 0; u < kRun; u++) {
        const float2 decayed = of_rows[u] * elements_of(state[f + u]);
        set_elements(state[f + u], decayed.x, decayed.y);
        Fragment operand;
        set_elements(operand, of_key.first[u], of_key.second[u]);
        simdgroup_multiply_accumulate(state[f + u], operand, delta, state[f + u]);
      }
    }
    inputs.chunk += long(value_heads) * kDeltaChunkFloats;
    inputs.query += kDeltaChunk * params.query.token;
    inputs.key += kDeltaChunk * params.key.token;
    inputs.decay += kDeltaChunk * params.decay.token;
    values += kDeltaChunk * params.value.token;
    target += row_step;
  }

  // Tokens of a sequence that is skipped, before the first packed one and after the last.
  const int before = fc_packed && number == 0 ? sequence.first : 0;
  const int room =
      fc_packed && number + 1 == params.sequences ? params.length - sequence.first : sequence.length;
  for (int token = at.row + (before > 0 ? -before : end); token < room; token += kFragment) {
    if (token < 0 || token >= end) {
      device Element* row =
          out + (token_index(sequence, token, params.length) * value_heads + value_head) * kValueDim + column;
      row[0] = row[1] = Element(0.0f);
    }
  }

  if (fc_writes_state && kept) {
    FATTN_UNROLL
    for (int f = 0; f < kRuns; f++) {
      device float* to = columns + Operands::state_row(f, at) * kValueDim;
      to[0] = state[f].thread_elements()[0];
      to[1] = state[f].thread_elements()[1];
    }
  }
}
