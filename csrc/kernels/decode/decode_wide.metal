// Decode with heads that are too wide for the registers of one simdgroup, or with values that are the first
// columns of their keys (multi-head latent attention: DeepSeek-V2, 2024).
//
// What goes in and out, and how rows are packed, is as in decode.metal. Here all simdgroups of a threadgroup
// work on the same rows and keys, and share out the columns: each holds its columns of the query and of the
// output in registers, and reads them alone of every key and value, so that a threadgroup loads each byte
// once, however many rows it has. A step goes like this:
//
//   each simdgroup   keys x query, summed over its columns      -> threadgroup memory
//   each thread      one score or two: the sum of all columns, modifiers, visibility -> threadgroup memory
//   each simdgroup   the weights of all rows; weights x values of its columns -> registers
//
// Keys are the left factor of the first product, so that a lane reads them as it reads values (tile.h), and
// values that are columns of the key are multiplied from the same registers.
#define FATTN_COLUMN_SHARES FATTN_SIMDGROUPS

#include "../common/columns.h"
#include "decode_rows.h"
#include "../common/scales.h"

namespace fattn {

FATTN_CONSTEXPR bool kValueInKey = FATTN_VALUE_IN_KEY;  // the value is the first columns of the key
FATTN_CONSTEXPR int kPackedRows = kRowGroups * 8;

// Columns that are read once for both products, and those of the key alone.
FATTN_CONSTEXPR int kSharedDim = kValueInKey ? kValueDim : 0;
typedef ColumnShare<0, kSharedDim> SharedColumns;
typedef ColumnShare<kSharedDim, kHeadDim> KeyColumns;
typedef ColumnShare<0, kValueDim> ValueColumns;
typedef RunOf<kSharedDim, kHeadDim, kKvFormat>::type KeyRun;
typedef RunOf<0, kValueDim, kKvFormat>::type ValueRun;
FATTN_CONSTEXPR int kQueryFragments = SharedColumns::kFragments + KeyColumns::kFragments;
FATTN_CONSTEXPR int kOutFragments = ValueColumns::kFragments;

typedef AttentionState<kRowGroups, kKeyFragments, kOutFragments> ColumnAttention;

// This simdgroup's columns of the query, the right factor: rows and columns of the fragments are exchanged.
struct QueryColumns {
  OperandFragment fragments[kRowGroups][kQueryFragments];

  QueryColumns() thread {}

  // The two rows of this lane in group r; null where the call has fewer rows.
  void load(int r, const device Element* first, const device Element* second, ushort simdgroup,
            LanePosition at) thread {
#pragma clang loop unroll(full)
    for (int f = 0; f < kQueryFragments; f++) {
      const int i = 2 * f + (at.row & 1);
      const int column = i < SharedColumns::kAll
                             ? SharedColumns::column_of(i, at.row / 2, simdgroup)
                             : KeyColumns::column_of(i - SharedColumns::kAll, at.row / 2, simdgroup);
      set_elements(fragments[r][f], first && column >= 0 ? Operand(first[column]) : Operand(0.0f),
                   second && column >= 0 ? Operand(second[column]) : Operand(0.0f));
    }
  }
};

// Adds to the products of key fragment k those with the columns of `run`, from query fragment `first` on.
template <int N>
inline void multiply_keys(thread ColumnAttention& attention, thread const QueryColumns& query, int k,
                          int first, int fragments, thread const Operand (&run)[N]) {
#pragma clang loop unroll(full)
  for (int f = 0; f < fragments; f++) {
    OperandFragment key;
    set_elements(key, run[2 * f], run[2 * f + 1]);
#pragma clang loop unroll(full)
    for (int r = 0; r < kRowGroups; r++) {
      simdgroup_multiply_accumulate(attention.score[r][k], key, query.fragments[r][first + f],
                                    attention.score[r][k]);
    }
  }
}

FATTN_CONSTEXPR int kStepScores = kPackedRows * kTileKeys;

// What the simdgroups tell each other in a step.
struct SharedScores {
  threadgroup float* products;  // [simdgroup][key fragment][row group][key][row], of its columns
  threadgroup float* scores;    // [row group][key fragment][row][key]

  void put_products(thread const ColumnAttention& attention, ushort simdgroup, LanePosition at) const thread {
#pragma clang loop unroll(full)
    for (int k = 0; k < kKeyFragments; k++) {
#pragma clang loop unroll(full)
      for (int r = 0; r < kRowGroups; r++) {
        threadgroup float* block = products + simdgroup * kStepScores + (k * kRowGroups + r) * 64;
#pragma clang loop unroll(full)
        for (int e = 0; e < 2; e++) {
          block[at.row * 8 + at.pair * 2 + e] = attention.score[r][k].thread_elements()[e];
        }
      }
    }
  }

  void take_scores(thread ColumnAttention& attention, LanePosition at) const thread {
#pragma clang loop unroll(full)
    for (int r = 0; r < kRowGroups; r++) {
#pragma clang loop unroll(full)
      for (int k = 0; k < kKeyFragments; k++) {
#pragma clang loop unroll(full)
        for (int e = 0; e < 2; e++) {
          attention.score[r][k].thread_elements()[e] = scores[index_of(r, k, e, at)];
        }
      }
    }
  }

 private:
  static int index_of(int r, int k, int e, LanePosition at) {
    return (r * kKeyFragments + k) * 64 + at.row * 8 + at.pair * 2 + e;
  }
};

// The row, of those packed, whose scores a thread finishes: of all keys that it has, the same.
inline int score_row(ushort thread_index) { return thread_index / 64 % kRowGroups * 8 + thread_index % 8; }

// This thread's scores, from the products of all simdgroups.
template <bool kEdge>
inline void finish_scores(thread const SharedScores& shared, thread const SharedScales& scales,
                          thread const Sequence& sequence, int first_key, ushort thread_index) {
  static_assert(kThreads % (64 * kRowGroups) == 0, "a thread has one row");
#pragma clang loop unroll(full)
  for (int n = 0; n < kStepScores; n += kThreads) {
    const int i = n + thread_index;
    if (i >= kStepScores) {
      continue;
    }
    float product = 0.0f;
#pragma clang loop unroll(full)
    for (int s = 0; s < kSimdgroups; s++) {
      product += shared.products[s * kStepScores + i];
    }
    const int k = i / 64 / kRowGroups;
    const int key_in_fragment = i / 8 % 8;
    const int key = first_key + k * 8 + key_in_fragment;
    if (kRowScales && fc_scales) {
      product = scaled_product(product, scales.of_key(k * 8 + key_in_fragment));
    }
    const int to = (i / 64 % kRowGroups * kKeyFragments + k) * 64 + i % 8 * 8 + key_in_fragment;
    float score = modified_score(product, sequence.modifiers, 0, key);
    if (kEdge) {
      const bool exists = sequence.table.block_of(key) >= 0 && sequence.table.holds(key);
      const bool seen = sees_key(score, sequence.visible, sequence.mask, 0, key, exists);
      score = seen ? score : -INFINITY;
    }
    shared.scores[to] = score;
  }
}

// One step of kTileKeys keys. kEdge: some key may not exist or not be visible to some row.
template <bool kEdge>
inline void wide_step(thread ColumnAttention& attention, thread const QueryColumns& query,
                      thread const Sequence& sequence, thread const SharedScores& shared,
                      thread const SharedScales& scales, thread const StepBlocks& blocks,
                      constant DecodeParams& params, int first_key, ushort thread_index, ushort simdgroup,
                      LanePosition at) {
  // Of the key that this thread looks after.
  float value_scale = 1.0f;
  if (kRowScales && fc_scales && thread_index < kTileKeys) {
    const KeyPlace place = blocks.find_own(sequence.table, first_key, thread_index);
    float key_scale = 1.0f;
    if (!kEdge || place.exists) {
      key_scale = float(*sequence.key.scales_at(place, params.key_scales));
      value_scale = float(*sequence.value.scales_at(place, params.value_scales));
    }
    scales.put_key(thread_index, key_scale);
  }
  ValueRun values[kKeyFragments];
  attention.clear_scores();
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    const int key = first_key + k * 8 + at.row;
    const KeyPlace place = blocks.find(sequence.table, key, k);
    const bool read = !kEdge || place.exists;
    KeyRun keys;
    if (read) {
      const StoredRow row = sequence.key.row_at(place, params.key, params.key_scales);
      keys.read(row, simdgroup, at);
      StoredRow value_row = row;
      if (!kValueInKey) {
        value_row = sequence.value.row_at(place, params.value, params.value_scales);
      }
      values[k].read(value_row, simdgroup, at);
    } else {
      keys.clear();
      values[k].clear();
    }
    if (kValueInKey) {
      Operand run[ValueRun::kElements];
      values[k].unpack(run);
      multiply_keys(attention, query, k, 0, SharedColumns::kFragments, run);
    }
    Operand run[KeyRun::kElements];
    keys.unpack(run);
    multiply_keys(attention, query, k, SharedColumns::kFragments, KeyColumns::kFragments, run);
  }
  shared.put_products(attention, simdgroup, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  finish_scores<kEdge>(shared, scales, sequence, first_key, thread_index);
  if (kRowScales && fc_scales && thread_index < kTileKeys) {
    scales.put_value(thread_index, value_scale);  // those of the step before have been read
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  shared.take_scores(attention, at);
  const SeenKeys seen = kEdge ? attention.seen_keys(at) : all_seen();
  attention.weigh();
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    scale_weights(attention, scales, k, seen, at);
    if (kEdge && !seen.value(k)) {
      values[k].clear();
    }
    Operand run[ValueRun::kElements];
    values[k].unpack(run);
    attention.multiply_values(k, run);
  }
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_decode_wide(
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
    ushort simdgroup_index [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float shared_products[kSimdgroups * kStepScores];
  threadgroup float shared_scores[kStepScores];
  threadgroup float2 shared_scales[kRowScales ? kTileKeys : 1];

  const LanePosition at = lane_position(lane);
  const uint3 group = group_in_grid(group_in_dispatch, slice);
  const int kv_head = int(group.y) / params.row_blocks;
  const int first_row = (int(group.y) % params.row_blocks) * kPackedRows;

  SharedScores shared;
  shared.products = shared_products;
  shared.scores = shared_scores;
  SharedScales scales;
  scales.pairs = shared_scales;
  QueryColumns columns;
  int query_batch = -1;

  Share share = share_of(seq_lens, params.span, params.batch, params.shares, int(group.x), lane);
  for (;;) {
    const ChunkIndex next = take_chunk(share, seq_lens, params.span, params.batch, params.shares, lane);
    if (next.batch < 0) {
      return;
    }
    const CutSequence cut = cut_sequence(seq_lens, params.span, next.batch);
    const WorkItem item = cut.item(next.part);
    if (item.batch != query_batch) {
#pragma clang loop unroll(full)
      for (int r = 0; r < kRowGroups; r++) {
        const int pair = first_row + r * 8 + at.pair * 2;
        const PackedRow first = packed_row(params, kv_head, pair);
        const PackedRow second = packed_row(params, kv_head, pair + 1);
        columns.load(r, first.of_query(query, params, item.batch), second.of_query(query, params, item.batch),
                     simdgroup_index, at);
      }
      query_batch = item.batch;
    }
    Sequence sequence;
    sequence.set_keys(params, key, value, kv_head, item);
    if (fc_scales) {
      sequence.key.scales = key_scales;
      sequence.value.scales = value_scales;
    }
    sequence.set_table(params, block_tables, item.batch * params.block_table_batch_stride);
    const PackedRow packed = packed_row(params, kv_head, first_row + score_row(thread_index));
    sequence.set_row(params, mask, tree_mask, item, packed);
    sequence.set_limits(limits_of(item, params.span));
    set_visible(sequence.visible, params, sequence.limits);
    sequence.modifiers = modifiers_of(params, sequence.visible.limit[0],
                                      fc_alibi ? slope_of(packed, item.batch, params, alibi_slopes) : 0.0f);

    ColumnAttention attention;
    attention.clear();
    if (fc_sinks && item.part == 0) {
#pragma clang loop unroll(full)
      for (int r = 0; r < kRowGroups; r++) {
        const PackedRow packed = packed_row(params, kv_head, first_row + r * 8 + at.row);
        if (packed.exists) {
          attention.add_sink(r, sink_score(float_at(sinks, packed.head * params.sinks_stride, fc_sinks_kind)),
                             at.pair == 0);
        }
      }
    }
    const Visits steps = visits_of(item.ranges, item.begin, item.end, kTileKeys);
    for (int visit = 0; visit < steps.count; visit++) {
      const int first_key = steps[visit] * kTileKeys;
      StepBlocks blocks;
      const bool exist = blocks.look_up(sequence.table, first_key, lane);
      if (exist & !fc_has_mask & item.ranges.all_see(first_key, first_key + kTileKeys)) {
        wide_step<false>(attention, columns, sequence, shared, scales, blocks, params, first_key,
                         thread_index, simdgroup_index, at);
      } else {
        wide_step<true>(attention, columns, sequence, shared, scales, blocks, params, first_key, thread_index,
                        simdgroup_index, at);
      }
    }
    attention.finish();

    ResultRows results;
    results.set(out, lse, partial_out, partial_sum, first_result_row(params, kv_head, item), params);
#pragma clang loop unroll(full)
    for (int r = 0; r < kRowGroups; r++) {
      const int row = first_row + r * 8 + at.row;
      if (row >= params.group_size * params.span.q_len) {
        continue;
      }
      const float scale = result_scale(attention.row_sum[r]);
#pragma clang loop unroll(full)
      for (int i = 0; i < 2 * kOutFragments; i++) {
        const int column = ValueColumns::column_of(i, at.pair, simdgroup_index);
        if (column >= 0) {
          const float element = attention.out[r][i / 2].thread_elements()[i & 1];
          results.put(row, column, scaled_result(element, scale));
        }
      }
      if (simdgroup_index == 0 && at.pair == 0) {
        RowSum sum = row_sum_of_weights(attention.row_max[r], attention.row_sum[r]);
        if (is_huge_sink(attention.row_max[r])) {
          sum.logit =
              float_at(sinks, packed_row(params, kv_head, row).head * params.sinks_stride, fc_sinks_kind);
        }
        results.put_sum(row, sum);
      }
    }
  }
}
