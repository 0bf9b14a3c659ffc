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

namespace fattn {

FATTN_CONSTEXPR int kKeyGroups = kSimdgroups / kRowGroups;  // simdgroups that share rows and split keys
FATTN_CONSTEXPR int kPackedRows = kRowGroups * 8;           // of a threadgroup

FATTN_CONSTEXPR int kRowThreads = kThreads / kPackedRows;  // threads that store a row
// Rows of states in threadgroup memory; simdgroups that share no row need none.
FATTN_CONSTEXPR int kSharedRows = kKeyGroups == 1 ? 1 : kSimdgroups * 8;
FATTN_CONSTEXPR int kOutPitch = kValueDim + 4;  // fewer rows begin in the same bank

// Of the rows of a key-value head, the first that a column of the grid has.
inline int first_packed_row(constant DecodeParams& params, int column) {
  return column % params.row_blocks * kPackedRows;
}

// The sum of a row of the threadgroup.
inline RowSum sum_of_row(float row_max, float sum, int row, const threadgroup SavedWork* saved) {
  RowSum of_row = row_sum_of_weights(row_max, sum);
  if (is_huge_sink(row_max)) {
    of_row.logit = DecodeState::sink_of(row, saved);
  }
  return of_row;
}

// This lane's part of a row whose keys no other simdgroup has.
inline void store_row(thread const OnlineAttention& attention, thread const ResultRows& results, int row,
                      const threadgroup SavedWork* saved, LanePosition at) {
  const float scale = result_scale(attention.row_sum[0]);
#pragma clang loop unroll(full)
  for (int i = 0; i < kValueDim / 4; i++) {
    const float element = attention.out[0][i / 2].thread_elements()[i & 1];
    results.put(row, value_column(i, at.pair), scaled_result(element, scale));
  }
  if (at.pair == 0) {
    results.put_sum(row, sum_of_row(attention.row_max[0], attention.row_sum[0], row, saved));
  }
}

inline ChunkResults chunk_results(constant DecodeParams& params, int column, thread const WorkItem& item) {
  const int skipped = first_packed_row(params, column);
  ChunkResults results;
  results.first_row = first_result_row(params, column / params.row_blocks, item) + skipped;
  results.rows = params.group_size * params.span.q_len - skipped;
  return results;
}

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

  // Adds up the states of row `row` of the threadgroup. kRowThreads threads do it, of which this is number
  // `thread_of_row`.
  void store(thread const ResultRows& results, int row, int thread_of_row,
             const threadgroup SavedWork* saved) const thread {
    float weights[kKeyGroups];
    float largest = -INFINITY;
#pragma clang loop unroll(full)
    for (int g = 0; g < kKeyGroups; g++) {
      largest = fmax(largest, row_max[g * kPackedRows + row]);
    }
    const float origin = largest == -INFINITY ? 0.0f : largest;
    float sum = 0.0f;
#pragma clang loop unroll(full)
    for (int g = 0; g < kKeyGroups; g++) {
      weights[g] = weight_of(row_max[g * kPackedRows + row] - origin);
      sum += weights[g] * row_sum[g * kPackedRows + row];
    }
    const float scale = result_scale(sum);
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
        values += weights[g] * *reinterpret_cast<const threadgroup float4*>(from);
      }
      results.put(row, column, scaled_result(values, scale));
    }
    if (thread_of_row == 0) {
      results.put_sum(row, sum_of_row(largest, sum, row, saved));
    }
  }
};

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_decode(
    const device Element* query [[buffer(fattn::kSlotQuery)]],
    const device Stored* key [[buffer(fattn::kSlotKey)]],
    const device Stored* value [[buffer(fattn::kSlotValue)]],
    device Element* out [[buffer(fattn::kSlotOut), function_constant(fc_whole)]],
    device float* lse [[buffer(fattn::kSlotLse), function_constant(fc_whole)]],
    constant DecodeParams& params [[buffer(fattn::kSlotParams)]],
    const device uchar* mask [[buffer(fattn::kSlotMask), function_constant(fc_has_mask)]],
    const device int* seq_lens [[buffer(fattn::kSlotSeqLens), function_constant(fc_has_seq_lens)]],
    const device int* block_tables [[buffer(fattn::kSlotBlockTables), function_constant(fc_paged)]],
    device float* partial_out [[buffer(fattn::kSlotPartialOut), function_constant(fc_split)]],
    device float4* partial_sum [[buffer(fattn::kSlotPartialSum), function_constant(fc_split)]],
    const device uchar* sinks [[buffer(fattn::kSlotSinks), function_constant(fc_sinks)]],
    const device uchar* alibi_slopes [[buffer(fattn::kSlotAlibiSlopes), function_constant(fc_alibi)]],
    const device long* tree_mask [[buffer(fattn::kSlotTreeMask), function_constant(fc_tree)]],
    const device Scale* key_scales [[buffer(fattn::kSlotKeyScales), function_constant(fc_scales)]],
    const device Scale* value_scales [[buffer(fattn::kSlotValueScales), function_constant(fc_scales)]],
    constant GridSlice& slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]],
    uint3 group_in_dispatch [[threadgroup_position_in_grid]],
    ushort simdgroup_index [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup uint shared_query[kRowGroups * kQueryWords];
  threadgroup float2 shared_scales[kRowScales ? kSimdgroups * kTileKeys : 1];
  threadgroup float4 shared_out[kSharedRows * kOutPitch / 4];  // as it is read, for its alignment
  threadgroup float shared_max[kSharedRows];
  threadgroup float shared_sum[kSharedRows];
  threadgroup SavedWork saved[kSimdgroups];

  const LanePosition at = lane_position(lane);
  DecodeState state;
  state.saved = saved + simdgroup_index;
  const ushort row_group = simdgroup_index % kRowGroups;
  const ushort row = row_group * 8 + at.row;  // of this lane, in the threadgroup
  const ushort key_group = simdgroup_index / kRowGroups;
  const uint3 group = group_in_grid(group_in_dispatch, slice);

  SharedStates states;
  states.out = reinterpret_cast<threadgroup float*>(shared_out);
  states.row_max = shared_max;
  states.row_sum = shared_sum;
  SharedScales scales;
  scales.pairs = shared_scales + (kRowScales ? simdgroup_index * kTileKeys : 0);
  SharedQuery query_rows;
  query_rows.pairs = shared_query + (row_group * kQueryWords | lane);

  Share share = share_of(seq_lens, params.span, params.batch, params.shares, int(group.x), lane);
  int column = int(group.y);
  if (at.pair == 0) {
    state.put_head(packed_row(params, column / params.row_blocks, first_packed_row(params, column) + row),
                   params, sinks, at);
  }
  int query_batch = -1;
  for (;;) {
    const ChunkIndex next = take_chunk(share, seq_lens, params.span, params.batch, params.shares, lane);
    if (next.batch < 0) {
      return;
    }
    const int kv_head = column / params.row_blocks;
    const PackedRow packed = packed_row(params, kv_head, first_packed_row(params, column) + row);
    if (next.batch != query_batch && key_group == 0) {
      query_rows.stage(packed.of_query(query, params, next.batch), at);
    }
    // The query is there, and the chunk before has been stored.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) {
      state.put_work(column, next.batch, next.part, share);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // From what is read back, so that nothing of how the chunk was found is held on to.
    const CutSequence cut = cut_sequence(seq_lens, params.span, state.batch());
    const WorkItem item = cut.item(state.part());
    Sequence sequence;
    sequence.set_keys(params, key, value, kv_head, item);
    if (fc_scales) {
      sequence.key.scales = key_scales;
      sequence.value.scales = value_scales;
    }
    sequence.set_row(params, mask, tree_mask, item, packed);

    OnlineAttention attention;
    attention.clear();
    if (fc_sinks && item.part == 0 && key_group == 0 && packed.exists) {
      attention.add_sink(0, sink_score(state.sink(at)), at.pair == 0);
    }
    if (lane == 0) {
      state.put_results(chunk_results(params, column, item));
      state.put_limits(limits_of(item, params.span));
      state.put_starts(sequence, item.batch * params.block_table_batch_stride);
    }
    if (at.pair == 0) {
      state.put_row(sequence, at);
      if (fc_alibi) {
        state.put_slope(slope_of(packed, item.batch, params, alibi_slopes), at);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const Visits steps = visits_of(item.ranges, item.begin, item.end, kTileKeys);
    const int end_step = steps.first + steps.count;
    for (int step = steps.first + key_group; step < end_step; step += kKeyGroups) {
      const int first_key = steps.behind_gap(step) * kTileKeys;
      sequence.set_table(params, block_tables, state.first_block_entry());
      StepBlocks blocks;
      const bool exist = blocks.look_up(sequence.table, first_key, lane);
      if (exist & !fc_has_mask & item.ranges.all_see(first_key, first_key + kTileKeys)) {
        decode_step<false>(attention, query_rows, sequence, scales, blocks, state, params, first_key, lane,
                           at);
      } else {
        sequence.set_limits(state.limits());
        decode_step<true>(attention, query_rows, sequence, scales, blocks, state, params, first_key, lane,
                          at);
      }
    }
    attention.finish();

    column = state.column();
    query_batch = state.batch();
    share = state.share();
    const ChunkResults chunk = state.results();
    ResultRows results;
    results.set(out, lse, partial_out, partial_sum, chunk.first_row, params);
    if (kKeyGroups == 1) {
      if (row < chunk.rows) {
        store_row(attention, results, row, saved, at);
      }
      continue;
    }
    states.put(attention, simdgroup_index, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int thread_index = simdgroup_index * kSimdWidth + lane;
    const int stored_row = thread_index / kRowThreads;
    if (stored_row < chunk.rows) {
      states.store(results, stored_row, thread_index % kRowThreads, saved);
    }
  }
}
