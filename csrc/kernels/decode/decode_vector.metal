// Decode of one or two packed rows per key-value head, where an 8x8 product would waste most of its rows.
//
// Inputs, outputs and the assignment of chunks are as in decode.metal. Here lanes hold columns, as in the
// vector kernels of MLX and llama.cpp: kKeyLanes lanes read a key, 16 bytes each at a time, and multiply it
// with their columns of the query. Sums over lanes are deferred until a step has one per lane of a key; then
// every shuffle adds two of them (scatter_sums), and each lane ends with one score. The output is summed over
// the lanes with other keys at the end of a chunk.
#define FATTN_GROUP_ROWS 1

#include "chunk_sum.h"
#include "vector_step.h"

namespace fattn {

FATTN_CONSTEXPR int kStates = kChunks * kSimdgroups * kPackedRows;

// The states of the simdgroups, which share rows and have different keys.
struct VectorStates {
  static constant constexpr int kRoundColumns = kValueDim;  // all in one round

  threadgroup float* out;  // [simdgroup][row][column]
  threadgroup float* row_max;
  threadgroup float* row_sum;

  void write(thread const VectorAttention& attention, ushort simdgroup_index, VectorLane at) const thread {
    FATTN_UNROLL
    for (int r = 0; r < kPackedRows; r++) {
      FATTN_UNROLL
      for (int i = 0; i < VectorAttention::kOwnColumns; i++) {
        const int column = VectorAttention::own_column(i, at);
        if (column < kValueDim) {
          out[(simdgroup_index * kPackedRows + r) * kValueDim + column] = attention.out[r][i];
        }
      }
    }
    if (at.saved.pair == 0) {
      row_max[simdgroup_index * kPackedRows + at.saved.row] = attention.row_max;
      row_sum[simdgroup_index * kPackedRows + at.saved.row] = attention.row_sum;
    }
  }

  // Merges the states of each row, with kThreads / kPackedRows threads per row.
  void store(thread ResultRows& results, const threadgroup SavedWork* saved, ushort thread_index) const
      thread {
    SavedSinks sinks;
    sinks.saved = saved;
    constexpr int kRowThreads = kThreads / kPackedRows;
    const int row = thread_index / kRowThreads;
    const int thread_of_row = thread_index % kRowThreads;
    StateWeights<kSimdgroups> states;
    states.set(row_max + row, row_sum + row, kPackedRows);
    const float scale = result_scale(states.sum);
    results.own_row = sinks.own_row = row;
    const long place = results.place(0);
    FATTN_UNROLL
    for (int first = 0; first < kValueDim; first += kRowThreads) {
      const int column = first + thread_of_row;
      if (column >= kValueDim) {
        continue;
      }
      float value = 0.0f;
      FATTN_UNROLL
      for (int g = 0; g < kSimdgroups; g++) {
        value += states.weights[g] * out[(g * kPackedRows + row) * kValueDim + column];
      }
      store_result(results.operands, place + column, scaled_result(value, scale));
    }
    if (thread_of_row == 0) {
      store_sum(results.operands, results.sum_place(0),
                row_sum_with_sink(states.largest, states.sum, sinks, 0));
    }
  }

  float value(int state, int column) const thread { return out[state * kValueDim + column]; }
  static int column(int of_round, int) { return of_round; }
};

// This simdgroup's steps of the chunk that `state` has.
inline void attend_chunk(thread VectorAttention& attention, thread const VectorQuery& query,
                         thread const SharedWeights& weights, thread const StepScales& scales,
                         thread const DecodeState& state, thread const Operands& operands,
                         constant DecodeParams& params, RowBlock block, PackedRow packed,
                         ushort simdgroup_of_chunk, ushort lane, VectorLane at) {
  // Reloaded, as in decode.metal.
  const WorkItem item = state.item(params.span);
  Sequence sequence;
  sequence.set(operands, params, block.kv_head, item, packed);
  scales.write(sequence, params, lane);
  state.put_sequence(sequence, item, packed, chunk_results(params, block, item), operands, params, at.saved);
  attention.clear();
  if (fc_sinks && item.part == 0 && simdgroup_of_chunk == 0) {
    attention.add_sink(sink_score(state.sink(at.saved)), at.saved.pair == 0);
  }

  const Visits steps = visits_of(item.ranges, item.begin, item.end, kTileKeys);
  const int end_step = steps.first + steps.count;
  for (int unit = steps.first + simdgroup_of_chunk; unit < end_step; unit += kSimdgroups) {
    sequence.set_table(operands, params, state.first_block_entry());
    StepKeys step;
    step.look_up(sequence.table, steps.past_gap(unit) * kTileKeys, lane);
    if (is_whole_step(step, item.ranges)) {
      vector_step<true>(attention, query, sequence, weights, scales, step, state, params, at);
    } else {
      sequence.set_limits(state.limits());
      vector_step<false>(attention, query, sequence, weights, scales, step, state, params, at);
    }
  }
  attention.finish(at);
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_decode_vector(
    FATTN_ATTENTION_ARGUMENTS(DecodeParams)) {
  threadgroup float shared_out[kStates * kValueDim];
  threadgroup float shared_max[kStates];
  threadgroup float shared_sum[kStates + kChunkSumFloats + kKeptFloats];
  threadgroup float4 shared_weights[kThreads / 4];  // float4 for its alignment
  threadgroup SavedScales saved_scales[kChunks * kSimdgroups];
  threadgroup SavedWork saved[kChunks * kSimdgroups];

  Operands operands;
  FATTN_TAKE_ARGUMENTS(operands);
  const VectorLane at = vector_lane(lane);
  const uint3 group = group_in_grid(group_in_dispatch, slice);

  VectorStates states;
  states.out = shared_out;
  states.row_max = shared_max;
  states.row_sum = shared_sum;
  SharedWeights weights;
  weights.lanes = shared_weights + simdgroup_index * (kSimdWidth / 4);
  StepScales scales;
  scales.saved = saved_scales + simdgroup_index;
  VectorQuery rows;
  DecodeState state;
  state.saved = saved + simdgroup_index;

  RowBlock block = row_block(params, int(group.y));
  if (at.saved.pair == 0) {
    state.put_head(packed_row(params, block, at.saved.row), operands, params, at.saved);
  }
  if (kChunks > 1) {
    const int batch = int(group.x);
    rows.load(operands, params, block, batch, at);
    ChunkSum<kSimdgroups> sum;
    sum.set(shared_max, shared_sum, kStates, params.span.max_chunks);
    for (int round = 0; round < kChunkRounds; round++) {
      const int chunk = round * kChunks + simdgroup_index / kSimdgroups;
      VectorAttention attention;
      attention.clear();
      if (state.put_chunk(batch, chunk, operands, params, lane)) {
        attend_chunk(attention, rows, weights, scales, state, operands, params, block,
                     packed_row(params, block, at.saved.row), simdgroup_index % kSimdgroups, lane, at);
      }
      if (round > 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the round before has been kept
      }
      states.write(attention, simdgroup_index, at);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      sum.to_weights(saved, round, simdgroup_index, lane);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (round < kChunkRounds - 1) {
        sum.keep(states, round, thread_in_group(simdgroup_index, lane));
      }
    }
    ResultRows results = results_of_sequence(operands, params, row_block(params, int(group.y)), batch);
    sum.store(states, results, 0, thread_in_group(simdgroup_index, lane));
    return;
  }

  Worker worker = worker_at(operands.seq_lens, params.span, params.batch, params.workers, int(group.x), lane);
  int query_batch = -1;
  for (;;) {
    const ChunkIndex next =
        take_chunk<true>(worker, operands.seq_lens, params.span, params.batch, params.workers, lane);
    if (next.batch < 0) {
      return;
    }
    const PackedRow packed = packed_row(params, block, at.saved.row);
    if (next.batch != query_batch) {
      rows.load(operands, params, block, next.batch, at);
    }
    state.put_work(block, next, worker, lane);

    VectorAttention attention;
    attend_chunk(attention, rows, weights, scales, state, operands, params, block, packed, simdgroup_index,
                 lane, at);

    block = state.block();
    query_batch = state.batch();
    worker = state.worker();
    ResultRows results;
    results.operands = operands;
    results.params = &params;
    results.block = block;
    results.chunk = state.results();
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the chunk before has been stored
    states.write(attention, simdgroup_index, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    states.store(results, saved, thread_in_group(simdgroup_index, lane));
  }
}
