// Decode: a few query rows per sequence over a long cache, dense or paged, split over the keys
// ("Flash-Decoding": Dao et al. 2023).
//
// All query heads that share a key-value head are packed into rows (group_size * q_len of them), so K and V
// are read once for the whole group. They go straight from device memory into fragments (see tile.h); a
// simdgroup holds eight rows, and simdgroups with other rows of the same keys work beside it.
//
// Sequences are cut into chunks (schedule.h). A threadgroup takes a run of neighbouring ones; its simdgroups
// take the steps of a chunk in turn and add up what they have at its end. A chunk's result is a partial one
// for merge.metal, unless no sequence can have a second.
#include "decode_step.h"
#include "state_weights.h"

namespace fattn {

FATTN_CONSTEXPR int kKeyGroups = kSimdgroups / kRowGroups;  // simdgroups that share rows and split keys
FATTN_CONSTEXPR int kRowThreads = kThreads / kPackedRows;   // threads that store a row
// Rows of states in threadgroup memory; simdgroups that share no row need none.
FATTN_CONSTEXPR int kSharedRows = kKeyGroups == 1 ? 1 : kSimdgroups * 8;
FATTN_CONSTEXPR int kOutPitch = kValueDim + 4;  // fewer rows begin in the same bank

// The rows of simdgroups that share them and have different keys, which become one result.
struct SharedStates {
  threadgroup float* out;  // [simdgroup][8][kOutPitch]
  threadgroup float* row_max;
  threadgroup float* row_sum;

  void put(thread const OnlineAttention& attention, ushort simdgroup_index, LanePosition at) const thread {
    const int row = simdgroup_index * 8 + at.row;
#pragma clang loop unroll(full)
    for (int i = 0; i < kValueDim / 4; i++) {
      out[row * kOutPitch + value_column(i, at.pair)] = attention.out[0][i / 2].thread_elements()[i & 1];
    }
    if (at.pair == 0) {
      row_max[row] = attention.row_max[0];
      row_sum[row] = attention.row_sum[0];
    }
  }

  // Adds up the states of the row of `results`. kRowThreads threads do it, of which this is number
  // `thread_of_row`.
  void store(thread const ResultRows& results, thread const SavedSinks& sinks, int thread_of_row) const
      thread {
    const int row = results.own_row;
    StateWeights<kKeyGroups> states;
    states.set(row_max + row, row_sum + row, kPackedRows);
    const float scale = result_scale(states.sum);
    const long place = results.place(0);
#pragma clang loop unroll(full)
    for (int first = 0; first < kValueDim; first += kRowThreads * 4) {
      const int column = first + thread_of_row * 4;
      if (column >= kValueDim) {
        continue;
      }
      float4 values = 0.0f;
#pragma clang loop unroll(full)
      for (int g = 0; g < kKeyGroups; g++) {
        const threadgroup float* from = out + (g * kPackedRows + row) * kOutPitch + column;
        values += states.weights[g] * *reinterpret_cast<const threadgroup float4*>(from);
      }
      results.put(place + column, scaled_result(values, scale));
    }
    if (thread_of_row == 0) {
      results.put_sum(0, row_sum_with_sink(states.largest, states.sum, sinks, 0));
    }
  }
};

// The end of a chunk. `row`: of this lane, in the threadgroup.
inline void store_chunk(thread const OnlineAttention& attention, thread ResultRows& results,
                        const threadgroup SavedWork* saved, thread const SharedStates& states, ushort row,
                        ushort simdgroup_index, LanePosition at) {
  SavedSinks sinks;
  sinks.saved = saved;
  if (kKeyGroups == 1) {
    results.own_row = sinks.own_row = row;
    store_rows<WholeRow>(attention, results, sinks, 0, at);
    return;
  }
  states.put(attention, simdgroup_index, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const ushort thread_index = thread_in_group(simdgroup_index, at.lane);
  results.own_row = sinks.own_row = thread_index / kRowThreads;
  if (results.exists(0)) {
    states.store(results, sinks, thread_index % kRowThreads);
  }
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_decode(
    FATTN_ATTENTION_ARGUMENTS(DecodeParams)) {
  threadgroup uint shared_query[kRowGroups * kQueryWords];
  threadgroup float2 shared_scales[kRowScales ? kSimdgroups * kTileKeys : 1];
  threadgroup float4 shared_out[kSharedRows * kOutPitch / 4];  // as it is read, for its alignment
  threadgroup float shared_max[kSharedRows];
  threadgroup float shared_sum[kSharedRows];
  threadgroup SavedWork saved[kSimdgroups];

  Operands operands;
  FATTN_TAKE_ARGUMENTS(operands);
  const LanePosition at = lane_position(lane);
  const uint3 group = group_in_grid(group_in_dispatch, slice);
  const ushort row_group = simdgroup_index % kRowGroups;
  const ushort key_group = simdgroup_index / kRowGroups;
  const ushort row = row_group * 8 + at.row;  // of this lane, in the threadgroup

  SharedStates states;
  states.out = reinterpret_cast<threadgroup float*>(shared_out);
  states.row_max = shared_max;
  states.row_sum = shared_sum;
  SharedScales scales;
  scales.pairs = shared_scales + (kRowScales ? simdgroup_index * kTileKeys : 0);
  SharedQuery query_rows;
  query_rows.pairs = shared_query + (row_group * kQueryWords + lane);
  DecodeState state;
  state.saved = saved + simdgroup_index;

  Share share = share_of(operands.seq_lens, params.span, params.batch, params.shares, int(group.x), lane);
  int column = int(group.y);
  if (at.pair == 0) {
    state.put_head(packed_row(params, row_block(params, column), row), operands, params, at);
  }
  int query_batch = -1;
  for (;;) {
    const ChunkIndex next =
        take_chunk(share, operands.seq_lens, params.span, params.batch, params.shares, lane);
    if (next.batch < 0) {
      return;
    }
    const RowBlock block = row_block(params, column);
    const PackedRow packed = packed_row(params, block, row);
    if (next.batch != query_batch && key_group == 0) {
      query_rows.stage(packed.of_query(query, params, next.batch), at);
    }
    // The query is there, and the chunk before has been stored.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    state.put_work(column, next, share, lane);

    // From what is read back, so that nothing of how the chunk was found is held on to.
    const CutSequence cut = cut_sequence(operands.seq_lens, params.span, state.batch());
    const WorkItem item = cut.item(state.part());
    Sequence sequence;
    sequence.set(operands, params, block.kv_head, item, packed);
    state.put_sequence(sequence, item, packed, chunk_results(params, block, item), operands, params, at);
    OnlineAttention attention;
    attention.clear();
    if (fc_sinks && item.part == 0 && key_group == 0 && packed.exists) {
      attention.add_sink(0, sink_score(state.sink(at)), at.pair == 0);
    }

    const Visits steps = visits_of(item.ranges, item.begin, item.end, kTileKeys);
    const int end_step = steps.first + steps.count;
    for (int unit = steps.first + key_group; unit < end_step; unit += kKeyGroups) {
      sequence.set_table(operands, params, state.first_block_entry());
      StepKeys step;
      step.look_up(sequence.table, steps.behind_gap(unit) * kTileKeys, lane);
      if (is_whole_step(step, item.ranges)) {
        decode_step<false>(attention, query_rows, sequence, scales, step, state, params, lane, at);
      } else {
        sequence.set_limits(state.limits());
        decode_step<true>(attention, query_rows, sequence, scales, step, state, params, lane, at);
      }
    }
    attention.finish();

    column = state.column();
    query_batch = state.batch();
    share = state.share();
    ResultRows results;
    results.operands = operands;
    results.params = &params;
    results.block = row_block(params, column);
    results.chunk = state.results();
    store_chunk(attention, results, saved, states, row, simdgroup_index, at);
  }
}
