// Decode: a few query rows per sequence over a long cache, dense or paged, split over the keys
// (Flash-Decoding: Dao et al. 2023).
//
// The query heads that share a key-value head are packed into group_size * q_len rows, so K and V are read
// once for the group. They go straight from device memory into fragments (tile.h). A simdgroup holds eight
// rows; other simdgroups have other rows of the same keys, or other keys for the same rows.
//
// Sequences are cut into chunks (schedule.h). A threadgroup takes a run of neighbouring chunks. Its
// simdgroups take the steps of a chunk in turn and merge their states at its end. A chunk yields a partial
// result for merge.metal, or the result if no sequence can have a second chunk. With a short
// cache, a threadgroup has all chunks at once, and yields the result (chunk_sum.h).
#include "chunk_sum.h"
#include "decode_step.h"

namespace fattn {

FATTN_CONSTEXPR int kKeyGroups = kSimdgroups / kRowGroups;  // simdgroups that share rows, with different keys
FATTN_CONSTEXPR int kRowThreads = kThreads / kPackedRows;   // threads that store one row
static_assert(kChunks == 1 || kKeyGroups > 1, "chunk_sum.h adds up states");
FATTN_CONSTEXPR int kSharedRows = shared_state_rows(kChunks, kSimdgroups, kRowGroups);
// The columns of the states are merged in rounds of kRoundElements elements per lane. All at once would take
// so much threadgroup memory that fewer threadgroups would fit on a core of M1 and M2.
FATTN_CONSTEXPR int kRunElements = kValueDim / 4;
FATTN_CONSTEXPR int kMaxElements = state_columns(kChunks) / 4;
FATTN_CONSTEXPR int kRoundElements = kRunElements < kMaxElements ? kRunElements : kMaxElements;
FATTN_CONSTEXPR int kRoundChunk = kValueChunk < kRoundElements ? kValueChunk : kRoundElements;
FATTN_CONSTEXPR int kOutPitch = state_pitch(kChunks, kValueDim);

// The states of simdgroups that share rows, with different keys.
struct SharedStates {
  static constant constexpr int kRoundColumns = 4 * kRoundElements;

  threadgroup float* out;  // [simdgroup][8][kOutPitch]
  threadgroup float* row_max;
  threadgroup float* row_sum;

  // Stores the round that begins with element `first` of each lane's run.
  void write(thread const OnlineAttention& attention, int first, ushort simdgroup_index,
             LanePosition at) const thread {
    const int row = simdgroup_index * 8 + at.row;
    FATTN_UNROLL
    for (int i = 0; i < kRoundElements && first + i < kRunElements; i++) {
      const int place = (i / kRoundChunk * 4 + at.pair) * kRoundChunk + i % kRoundChunk;
      out[row * kOutPitch + place] = attention.out[0][(first + i) / 2].thread_elements()[i & 1];
    }
    if (first == 0 && at.pair == 0) {
      row_max[row] = attention.row_max[0];
      row_sum[row] = attention.row_sum[0];
    }
  }

  // Merges the states of one row, relative to their largest maximum m: o = sum exp(m_g - m) o_g, likewise the
  // sums. Covers the columns of the round from element `first` on. `thread_of_row`: this thread among the
  // kRowThreads threads of the row.
  void store(thread const ResultRows& results, thread const SavedSinks& sinks, int first,
             int thread_of_row) const thread {
    const int row = results.own_row;
    StateWeights<kKeyGroups> states;
    states.set(row_max + row, row_sum + row, kPackedRows);
    const float scale = result_scale(states.sum);
    const long place = results.place(0);
    FATTN_UNROLL
    for (int from = 0; from < kRoundColumns; from += kRowThreads * 4) {
      const int of_round = from + thread_of_row * 4;
      const int column = SharedStates::column(of_round, first);
      if (of_round >= kRoundColumns || column >= kValueDim) {
        continue;
      }
      float4 values = 0.0f;
      FATTN_UNROLL
      for (int g = 0; g < kKeyGroups; g++) {
        const threadgroup float* from = out + (g * kPackedRows + row) * kOutPitch + of_round;
        values += states.weights[g] * *reinterpret_cast<const threadgroup float4*>(from);
      }
      store_result(results.operands, place + column, scaled_result(values, scale));
    }
    if (first == 0 && thread_of_row == 0) {
      store_sum(results.operands, results.sum_place(0),
                row_sum_with_sink(states.largest, states.sum, sinks, 0));
    }
  }

  float value(int state, int of_round) const thread { return out[state * kOutPitch + of_round]; }
  // The result column of column `of_round` in the round from element `first` on.
  static int column(int of_round, int first) {
    const int piece = of_round / kRoundChunk;
    return kValueChunk == kRoundChunk
               ? 4 * first + of_round
               : value_column(first + piece / 4 * kRoundChunk + of_round % kRoundChunk, piece % 4);
  }
};

// The end of a chunk. `row`: this lane's row in the threadgroup.
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
  const ushort thread_index = thread_in_group(simdgroup_index, at.lane);
  results.own_row = sinks.own_row = thread_index / kRowThreads;
  FATTN_UNROLL
  for (int first = 0; first < kRunElements; first += kRoundElements) {
    if (first > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the round before has been stored
    }
    states.write(attention, first, simdgroup_index, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (results.exists(0)) {
      states.store(results, sinks, first, thread_index % kRowThreads);
    }
  }
}

// This simdgroup's steps of the chunk that `state` has.
inline void attend_chunk(thread OnlineAttention& attention, thread const SharedQuery& query,
                         thread const SharedScales& scales, thread const DecodeState& state,
                         thread const Operands& operands, constant DecodeParams& params, RowBlock block,
                         PackedRow packed, ushort key_group, ushort lane, LanePosition at) {
  // Reloaded, so that the search for the chunk leaves nothing in registers.
  const WorkItem item = state.item(params.span);
  Sequence sequence;
  sequence.set(operands, params, block.kv_head, item, packed);
  state.put_sequence(sequence, item, packed, chunk_results(params, block, item), operands, params, at);
  attention.clear();
  if (fc_sinks && item.part == 0 && key_group == 0 && packed.exists) {
    attention.add_sink(0, sink_score(state.sink(at)), at.pair == 0);
  }

  const Visits steps = visits_of(item.ranges, item.begin, item.end, kTileKeys);
  const int end_step = steps.first + steps.count;
  for (int unit = steps.first + key_group; unit < end_step; unit += kKeyGroups) {
    sequence.set_table(operands, params, state.first_block_entry());
    StepKeys step;
    step.look_up(sequence.table, steps.past_gap(unit) * kTileKeys, lane);
    if (is_whole_step(step, item.ranges)) {
      decode_step<true>(attention, query, sequence, scales, step, state, params, lane, at);
    } else {
      sequence.set_limits(state.limits());
      decode_step<false>(attention, query, sequence, scales, step, state, params, lane, at);
    }
  }
  attention.finish();
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_decode(
    FATTN_ATTENTION_ARGUMENTS(DecodeParams)) {
  threadgroup uint shared_query[kRowGroups * kQueryWords];
  threadgroup float2 shared_scales[scale_pairs(kRowScales, kChunks * kSimdgroups * kTileKeys)];
  threadgroup float4 shared_out[kSharedRows * kOutPitch / 4];  // float4 for its alignment
  threadgroup float shared_max[kSharedRows];
  threadgroup float shared_sum[kSharedRows + kChunkSumFloats];
  threadgroup SavedWork saved[kChunks * kSimdgroups];

  Operands operands;
  FATTN_TAKE_ARGUMENTS(operands);
  const LanePosition at = lane_position(lane);
  const uint3 group = group_in_grid(group_in_dispatch, slice);
  const ushort row_group = simdgroup_index % kRowGroups;
  const ushort key_group = (kChunks == 1 ? simdgroup_index : simdgroup_index % kSimdgroups) / kRowGroups;
  const ushort row = row_group * 8 + at.row;  // this lane's row in the threadgroup

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

  RowBlock block = row_block(params, int(group.y));
  if (at.pair == 0) {
    state.put_head(packed_row(params, block, row), operands, params, at);
  }
  if (kChunks > 1) {
    const int batch = int(group.x);
    const PackedRow packed = packed_row(params, block, row);
    if (simdgroup_index < kRowGroups) {
      query_rows.stage(packed.of_query(query, params, batch), at);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the query has been staged
    const int chunk = simdgroup_index / kSimdgroups;
    OnlineAttention attention;
    attention.clear();
    if (state.put_chunk(batch, chunk, operands, params, lane)) {
      attend_chunk(attention, query_rows, scales, state, operands, params, block, packed, key_group, lane,
                   at);
    }
    ResultRows results = results_of_sequence(operands, params, row_block(params, int(group.y)), batch);
    ChunkSum<kKeyGroups> sum;
    sum.set(shared_max, shared_sum, kSharedRows, params.span.max_chunks);
    FATTN_UNROLL
    for (int first = 0; first < kRunElements; first += kRoundElements) {
      if (first > 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the round before has been stored
      }
      states.write(attention, first, simdgroup_index, at);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (first == 0) {
        sum.to_weights(saved, 0, simdgroup_index, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      sum.store(states, results, first, thread_in_group(simdgroup_index, lane));
    }
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
    const PackedRow packed = packed_row(params, block, row);
    if (next.batch != query_batch && key_group == 0) {
      query_rows.stage(packed.of_query(query, params, next.batch), at);
    }
    // The query has been staged, and the previous chunk stored.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    state.put_work(block, next, worker, lane);

    OnlineAttention attention;
    attend_chunk(attention, query_rows, scales, state, operands, params, block, packed, key_group, lane, at);

    block = state.block();
    query_batch = state.batch();
    worker = state.worker();
    ResultRows results;
    results.operands = operands;
    results.params = &params;
    results.block = block;
    results.chunk = state.results();
    store_chunk(attention, results, saved, states, row, simdgroup_index, at);
  }
}
