// Decode: a few query rows per sequence over a long cache, dense or paged, split over the keys
// ("Flash-Decoding": Dao et al. 2023).
//
// All query heads that share a key-value head are packed into rows (group_size * q_len of them), so K and V
// are read once for the whole group. They go straight from device memory into fragments (see tile.h); a
// simdgroup holds eight rows, and simdgroups with other rows of the same keys work beside it.
//
// Every sequence is cut into chunks of chunk_keys keys, counted from key 0. The threadgroups share out the
// chunks of the whole batch evenly, each reading all lengths: a long sequence among short ones keeps the
// whole GPU busy, and no result depends on what else is in the batch. A chunk's result is a partial one for
// merge.metal, unless no sequence can have a second.
#include "keys.h"
#include "scores.h"
#include "steps.h"

namespace fattn {

FATTN_CONSTEXPR int kKeyGroups = kSimdgroups / kRowGroups;  // simdgroups that share rows and split keys
FATTN_CONSTEXPR int kPackedRows = kRowGroups * 8;           // of a threadgroup

// Two elements as the words they are stored in.
FATTN_CONSTEXPR int kPairWords = 2 * sizeof(Operand) / 4;
FATTN_CONSTEXPR int kQueryWords = kRowGroups * kHeadDim / 8 * kPairWords * kSimdWidth;
FATTN_CONSTEXPR int kOutWords = kSimdgroups * 8 * kValueDim;

// The query rows of a simdgroup, in threadgroup memory: a pair of elements per lane and fragment. In
// registers they would take a quarter of what there is.
struct SharedQuery {
  // Of this lane. Volatile, or the compiler would read the pairs once and hold them in registers all the
  // same.
  volatile threadgroup uint* pairs;

  // `row` is this lane's row; null when the call has fewer rows.
  void stage(const device Element* row, LanePosition at) thread {
    Operand run[kHeadDim / 4];
    if (row) {
      read_query(row, fc_vector_loads, at, run);
    } else {
      fill_run(run, 0.0f);
    }
#pragma clang loop unroll(full)
    for (int f = 0; f < kHeadDim / 8; f++) {
      put_pair(pairs + f * (kPairWords * kSimdWidth), run[query_element(f)],
               run[query_element(f) + kKeyChunk]);
    }
  }

  OperandFragment rows(int, int f) const thread {
    return pair_at(pairs + f * (kPairWords * kSimdWidth), Operand(0.0f));
  }

 private:
  static void put_pair(volatile threadgroup uint* pair, half first, half second) {
    *pair = as_type<uint>(half2(first, second));
  }
  static void put_pair(volatile threadgroup uint* pair, float first, float second) {
    pair[0] = as_type<uint>(first);
    pair[kSimdWidth] = as_type<uint>(second);
  }
  // The last argument only tells the type.
  static OperandFragment pair_at(volatile threadgroup uint* pair, half) {
    const half2 elements = as_type<half2>(*pair);
    return fragment_of(elements[0], elements[1]);
  }
  static OperandFragment pair_at(volatile threadgroup uint* pair, float) {
    return fragment_of(as_type<float>(pair[0]), as_type<float>(pair[kSimdWidth]));
  }
  template <typename T>
  static OperandFragment fragment_of(T first, T second) {
    OperandFragment result;
    set_elements(result, Operand(first), Operand(second));
    return result;
  }
};

// What the steps of a chunk share.
struct Chunk {
  const device Element* key;  // of this sequence and head
  const device Element* value;
  const device uchar* mask;
  KeyTable table;
  KeyRanges ranges;
  Visibility visible;
  ScoreModifiers modifiers;
};

// One step of kTileKeys keys. kEdge: some key may not exist or not be visible to some row.
template <bool kEdge>
inline void decode_step(thread OnlineAttention& attention, thread const SharedQuery& query,
                        thread const Chunk& chunk, thread const StepBlocks& blocks,
                        constant DecodeParams& params, int first_key, LanePosition at) {
  uint present = 0;
  attention.clear_scores();
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    const device Element* rows[2];
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; e++) {
      const int key = first_key + k * 8 + at.pair * 2 + e;
      const KeyPlace place = blocks.find(chunk.table, key, k);
      const bool read = place.exists && chunk.ranges.hold(key);
      rows[e] = row_at(chunk.key, place, params.key);
      present |= uint(read) << (2 * k + e);
    }
#pragma clang loop unroll(full)
    for (int c = 0; c < kKeyChunks; c++) {
      Operand keys[2][kKeyChunk];
#pragma clang loop unroll(full)
      for (int e = 0; e < 2; e++) {
        if (!kEdge || (present >> (2 * k + e)) & 1) {
          read_key_chunk(rows[e], c, fc_vector_loads, at, keys[e]);
        } else {
          fill_run(keys[e], 0.0f);
        }
      }
      attention.multiply_key_fragment(query, c, k, keys[0], keys[1]);
    }
  }
  modify_scores(attention, chunk.modifiers, first_key, at);
  if (kEdge) {
    hide_scores(attention, chunk.visible, chunk.mask, first_key, present, at);
  }
  attention.weigh();
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    const int key = first_key + k * 8 + at.row;
    const KeyPlace place = blocks.find(chunk.table, key, k);
    const bool read = place.exists && chunk.ranges.hold(key);
    Operand run[kValueDim / 4];
    if (!kEdge || read) {
      read_value(row_at(chunk.value, place, params.value), fc_vector_loads, at, run);
    } else {
      fill_run(run, 0.0f);
    }
    if (kEdge && !fc_one_row && simd_any(isnan(special_values(run, 0.0f)))) {
      attention.multiply_special_values(k, run, at);
    } else {
      attention.multiply_values(k, run);
    }
  }
}

// The results of the simdgroups that share rows, until they are one.
struct SharedStates {
  threadgroup float* out;  // [simdgroup][8][kValueDim]
  threadgroup float* row_max;
  threadgroup float* row_sum;

  void put(thread const OnlineAttention& attention, ushort simdgroup_index, LanePosition at) thread {
    const int row = simdgroup_index * 8 + at.row;
#pragma clang loop unroll(full)
    for (int i = 0; i < kValueDim / 4; i++) {
      out[row * kValueDim + value_column(i, at.pair)] = attention.out[0][i / 2].thread_elements()[i & 1];
    }
    if (at.pair == 0) {
      row_max[row] = attention.row_max[0];
      row_sum[row] = attention.row_sum[0];
    }
  }
};

// Where the rows of a chunk's result go.
struct ResultRows {
  device Element* out;
  device float* lse;
  device float* partial_out;
  device float* partial_lse;
  long first_partial_row;

  void put(long flat_row, int column, float value) const thread {
    if (fc_split) {
      partial_out[(first_partial_row + flat_row) * kValueDim + column] = value;
    } else {
      out[flat_row * kValueDim + column] = Element(value);
    }
  }
  void put_lse(long flat_row, float value) const thread {
    if (fc_split) {
      partial_lse[first_partial_row + flat_row] = value;
    } else {
      lse[flat_row] = value;
    }
  }
};

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_decode(
    const device Element* query [[buffer(fattn::kSlotQuery)]],
    const device Element* key [[buffer(fattn::kSlotKey)]],
    const device Element* value [[buffer(fattn::kSlotValue)]],
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
    uint3 group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], ushort thread_index [[thread_index_in_threadgroup]]) {
  // The query first, then what the simdgroups have summed.
  threadgroup uint shared[kQueryWords > kOutWords ? kQueryWords : kOutWords];
  threadgroup float shared_max[kSimdgroups * 8];
  threadgroup float shared_sum[kSimdgroups * 8];

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

  SharedQuery query_rows;
  threadgroup float* shared_out = reinterpret_cast<threadgroup float*>(shared);
  query_rows.pairs = shared + row_group * (kHeadDim / 8 * kPairWords * kSimdWidth) + lane;

  const WorkItem item = find_item(seq_lens, params.span, params.batch, int(group.x), lane);
  if (item.batch < 0) {
    return;
  }
  const long batch = item.batch;
  const int length = item.length;

  Chunk chunk;
  chunk.ranges = newest_rows(params.span, length);
  chunk.mask = mask;
  chunk.key = key + kv_head * params.key.head;
  chunk.value = value + kv_head * params.value.head;
  chunk.table.length = length;
  chunk.table.num_blocks = params.num_blocks;
  chunk.table.entry_stride = params.block_table_entry_stride;
  if (fc_paged) {
    chunk.table.blocks = block_tables + batch * params.block_table_batch_stride;
  } else {
    chunk.key += batch * params.key.batch;
    chunk.value += batch * params.value.batch;
  }
  const int position = length - params.span.q_len + row;
  chunk.visible.limit[0] = row_exists ? position + 1 : 0;
  chunk.visible.window_begin[0] = position - params.span.window_left;
  chunk.visible.sink_end[0] = min(params.span.sink_tokens, chunk.visible.limit[0]);
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

  if (key_group == 0) {
    const device Element* query_row =
        query + batch * params.query.batch + head * params.query.head + row * params.query.row;
    query_rows.stage(row_exists ? query_row : nullptr, at);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  OnlineAttention attention;
  attention.clear();
  if (fc_sinks && item.part == 0 && key_group == 0 && row_exists) {
    const float unit = fc_additive_mask ? 1.0f : M_LOG2E_F;
    attention.add_sink(0, sinks[head * params.sinks_stride] * unit, at.pair == 0);
  }

  const int chunk_begin = chunks_of(chunk.ranges, params.span.chunk_keys)[item.part] * params.span.chunk_keys;
  const int chunk_end = min(chunk_begin + params.span.chunk_keys, chunk.ranges.end);
  const Visits steps = visits_of(chunk.ranges, chunk_begin, chunk_end, kTileKeys);
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

  threadgroup_barrier(mem_flags::mem_threadgroup);  // the query has been read
  SharedStates states;
  states.out = shared_out;
  states.row_max = shared_max;
  states.row_sum = shared_sum;
  states.put(attention, simdgroup_index, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  ResultRows results;
  results.first_partial_row = 0;
  if (fc_split) {
    results.partial_out = partial_out;
    results.partial_lse = partial_lse;
    results.first_partial_row = long(item.part) * params.batch * params.q_heads * params.span.q_len;
  } else {
    results.out = out;
    results.lse = lse;
  }
  for (int i = thread_index; i < kPackedRows * kValueDim; i += kThreads) {
    const int tile_row = i / kValueDim;
    const int column = i % kValueDim;
    const int result_row = first_packed_row + tile_row;
    if (result_row >= packed_rows) {
      continue;
    }
    float row_max = -INFINITY;
    for (int g = 0; g < kKeyGroups; g++) {
      row_max = fmax(row_max, shared_max[g * kPackedRows + tile_row]);
    }
    const float origin = row_max == -INFINITY ? 0.0f : row_max;
    float sum = 0.0f;
    float weighted = 0.0f;
    for (int g = 0; g < kKeyGroups; g++) {
      const float weight = weight_of(shared_max[g * kPackedRows + tile_row] - origin);
      sum += weight * shared_sum[g * kPackedRows + tile_row];
      weighted += weight * shared_out[(g * kPackedRows + tile_row) * kValueDim + column];
    }
    const long result_head = kv_head * params.group_size + result_row / params.span.q_len;
    const long flat_row =
        (batch * params.q_heads + result_head) * params.span.q_len + result_row % params.span.q_len;
    results.put(flat_row, column, weighted * inverse_sum(sum));
    if (column == 0) {
      results.put_lse(flat_row, log_sum_exp(row_max, sum));
    }
  }
}
