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
#include "schedule.h"

namespace fattn {

FATTN_CONSTEXPR int kKeyGroups = kSimdgroups / kRowGroups;  // simdgroups that share rows and split keys
FATTN_CONSTEXPR int kPackedRows = kRowGroups * 8;           // of a threadgroup

FATTN_CONSTEXPR int kRowThreads = kThreads / kPackedRows;  // threads that store a row
// Rows of states in threadgroup memory; simdgroups that share no row need none.
FATTN_CONSTEXPR int kSharedRows = kKeyGroups == 1 ? 1 : kSimdgroups * 8;
FATTN_CONSTEXPR int kOutPitch = kValueDim + 4;  // fewer rows begin in the same bank

// Where the rows of a chunk's result go.
struct ResultRows {
  device Element* out;
  device float* lse;
  device float* partial_out;
  device float* partial_lse;
  long first_partial_row;

  void put(long row, int column, float value) const thread {
    if (fc_split) {
      partial_out[(first_partial_row + row) * kValueDim + column] = value;
    } else {
      out[row * kValueDim + column] = Element(value);
    }
  }
  void put(long row, int column, float4 values) const thread {
    if (fc_split) {
      *reinterpret_cast<device float4*>(partial_out + (first_partial_row + row) * kValueDim + column) =
          values;
    } else {
      *reinterpret_cast<device vec<Element, 4>*>(out + row * kValueDim + column) = vec<Element, 4>(values);
    }
  }
  void put_lse(long row, float value) const thread {
    if (fc_split) {
      partial_lse[first_partial_row + row] = value;
    } else {
      lse[row] = value;
    }
  }
};

// This lane's part of a row whose keys no other simdgroup has.
inline void store_row(thread const OnlineAttention& attention, thread const ResultRows& results,
                      long result_row, LanePosition at) {
  const float inverse = inverse_sum(attention.row_sum[0]);
#pragma clang loop unroll(full)
  for (int i = 0; i < kValueDim / 4; i++) {
    const float element = attention.out[0][i / 2].thread_elements()[i & 1];
    results.put(result_row, value_column(i, at.pair), element * inverse);
  }
  if (at.pair == 0) {
    results.put_lse(result_row, log_sum_exp(attention.row_max[0], attention.row_sum[0]));
  }
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
  void store(thread const ResultRows& results, int row, long result_row, int thread_of_row) const thread {
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
    const float inverse = inverse_sum(sum);
    for (int column = thread_of_row * 4; column < kValueDim; column += kRowThreads * 4) {
      float4 values = 0.0f;
#pragma clang loop unroll(full)
      for (int g = 0; g < kKeyGroups; g++) {
        const threadgroup float* from = out + (g * kPackedRows + row) * kOutPitch + column;
        values += weights[g] * *reinterpret_cast<const threadgroup float4*>(from);
      }
      results.put(result_row, column, values * inverse);
    }
    if (thread_of_row == 0) {
      results.put_lse(result_row, log_sum_exp(largest, sum));
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
    device float* partial_lse [[buffer(fattn::kSlotPartialLse), function_constant(fc_split)]],
    const device float* sinks [[buffer(fattn::kSlotSinks), function_constant(fc_sinks)]],
    const device float* alibi_slopes [[buffer(fattn::kSlotAlibiSlopes), function_constant(fc_alibi)]],
    const device long* tree_mask [[buffer(fattn::kSlotTreeMask), function_constant(fc_tree)]],
    const device Scale* key_scales [[buffer(fattn::kSlotKeyScales), function_constant(fc_scales)]],
    const device Scale* value_scales [[buffer(fattn::kSlotValueScales), function_constant(fc_scales)]],
    uint3 group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint shared_query[kRowGroups * kQueryWords];
  threadgroup float2 shared_scales[kRowScales ? kSimdgroups * kTileKeys : 1];
  threadgroup float shared_out[kSharedRows * kOutPitch];
  threadgroup float shared_max[kSharedRows];
  threadgroup float shared_sum[kSharedRows];

  const LanePosition at = lane_position(lane);
  const int row_group = simdgroup_index % kRowGroups;
  const int key_group = simdgroup_index / kRowGroups;
  const int kv_head = int(group.y) / params.row_blocks;
  const int first_packed_row = (int(group.y) % params.row_blocks) * kPackedRows;
  const int packed_rows = params.group_size * params.span.q_len;
  const int packed_row = first_packed_row + row_group * 8 + at.row;
  const bool row_exists = packed_row < packed_rows;
  const int head = kv_head * params.group_size + packed_row / params.span.q_len;
  const int row = packed_row % params.span.q_len;

  SharedStates states;
  states.out = shared_out;
  states.row_max = shared_max;
  states.row_sum = shared_sum;
  SharedQuery query_rows;
  query_rows.pairs = shared_query + row_group * kQueryWords + lane;
  int query_batch = -1;

  Share share = share_of(seq_lens, params.span, params.batch, params.shares, int(group.x), lane);
  while (share.left > 0 && share.batch < params.batch) {
    const long batch = share.batch;
    const int length = length_of(seq_lens, params.span, share.batch);
    Chunk chunk;
    chunk.ranges = newest_rows(params.span, length);
    const Chunks chunks = chunks_of(chunk.ranges, params.span);
    if (share.part == chunks.count()) {
      share.batch++;
      share.part = 0;
      continue;
    }
    const int part = share.part;
    share.part++;
    share.left -= chunks.keys / params.span.chunk_unit;

    if (share.batch != query_batch && key_group == 0) {
      const device Element* query_row =
          query + batch * params.query.batch + head * params.query.head + row * params.query.row;
      query_rows.stage(row_exists ? query_row : nullptr, at);
    }
    query_batch = share.batch;
    // The query is there, and the chunk before has been stored.
    threadgroup_barrier(mem_flags::mem_threadgroup);

    chunk.mask = mask;
    chunk.key.elements = key + kv_head * params.key.head;
    chunk.value.elements = value + kv_head * params.value.head;
    chunk.scales.pairs = shared_scales + (kRowScales ? simdgroup_index * kTileKeys : 0);
    chunk.scales.lane = lane;
    if (fc_scales) {
      chunk.key.scales = key_scales;
      chunk.value.scales = value_scales;
    }
    chunk.key.batch = chunk.value.batch = share.batch;
    chunk.key.head = chunk.value.head = kv_head;
    chunk.table.length = length;
    chunk.table.num_blocks = params.num_blocks;
    chunk.table.entry_stride = params.block_table_entry_stride;
    if (fc_paged) {
      chunk.table.blocks = block_tables + batch * params.block_table_batch_stride;
    } else {
      chunk.key.elements += batch * params.key.batch;
      chunk.value.elements += batch * params.value.batch;
    }
    const int position = length - params.span.q_len + row;
    chunk.visible.limit[0] = row_exists ? position + 1 : 0;
    chunk.visible.window_begin[0] = position - params.span.window_left;
    chunk.visible.sink_end = params.span.sink_tokens;
    chunk.visible.first_draft = length - params.span.q_len;
    if (fc_tree) {
      chunk.visible.drafts[0] =
          uint(tree_mask[batch * params.tree_mask_batch_stride + row * params.tree_mask_row_stride]);
    }
    chunk.visible.mask_row[0] = batch * params.mask.batch + head * params.mask.head + row * params.mask.row;
    chunk.visible.mask_key_stride = params.mask.key;
    chunk.modifiers.scale = params.score_scale;
    chunk.modifiers.softcap = params.softcap;
    chunk.modifiers.position[0] = position;
    if (fc_alibi) {
      chunk.modifiers.slope[0] =
          row_exists ? alibi_slopes[head * params.alibi_slopes_stride] * params.slope_scale : 0.0f;
    }

    OnlineAttention attention;
    attention.clear();
    if (fc_sinks && part == 0 && key_group == 0 && row_exists) {
      const float unit = fc_additive_mask ? 1.0f : M_LOG2E_F;
      attention.add_sink(0, sinks[head * params.sinks_stride] * unit, at.pair == 0);
    }
    const int begin = chunks.begin(part);
    const Visits steps =
        visits_of(chunk.ranges, begin, min(begin + chunks.keys, chunk.ranges.end), kTileKeys);
    for (int visit = key_group; visit < steps.count; visit += kKeyGroups) {
      const int first_key = steps[visit] * kTileKeys;
      StepBlocks blocks;
      const bool exist = blocks.look_up(chunk.table, first_key, lane);
      if (exist && !fc_has_mask && chunk.ranges.all_see(first_key, first_key + kTileKeys)) {
        decode_step<false>(attention, query_rows, chunk, blocks, params, first_key, at);
      } else {
        decode_step<true>(attention, query_rows, chunk, blocks, params, first_key, at);
      }
    }
    attention.finish();

    ResultRows results;
    if (fc_split) {
      results.partial_out = partial_out;
      results.partial_lse = partial_lse;
      results.first_partial_row = long(part) * params.batch * params.q_heads * params.span.q_len;
    } else {
      results.out = out;
      results.lse = lse;
    }
    const long first_row = (batch * params.q_heads + kv_head * params.group_size) * params.span.q_len;
    if (kKeyGroups == 1) {
      if (row_exists) {
        store_row(attention, results, first_row + packed_row, at);
      }
      continue;
    }
    states.put(attention, simdgroup_index, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int stored_row = first_packed_row + thread_index / kRowThreads;
    if (stored_row < packed_rows) {
      states.store(results, thread_index / kRowThreads, first_row + stored_row, thread_index % kRowThreads);
    }
  }
}
