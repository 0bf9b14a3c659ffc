// Prefill for heads that exceed the registers of one simdgroup.
//
// Inputs, outputs and the packing of rows are as in prefill.metal. Here kColumnShares simdgroups work on the
// same kRowFragments * 8 rows, and each holds its columns of the output in registers. A step:
//
//   each simdgroup   its share of the keys x query -> threadgroup memory
//   each simdgroup   modifiers, visibility and weights of all scores; weights x values of its columns
//
// The query is in threadgroup memory, where all simdgroups of its rows read it. Keys and values come straight
// from the cache: a simdgroup reads its keys, and its columns of the values, once for all its rows.
// kRowGroups simdgroups read the same bytes in the same step.
//
// Products alternate between two buffers, so a step needs a single barrier: it separates the writes to a
// buffer from its last reads, two steps ago.
//
// Keys are the left factor of the first product, so a lane reads them as it reads values (tile.h).
#define FATTN_COLUMN_SHARES (FATTN_SIMDGROUPS / FATTN_ROW_GROUPS)

#include "../common/scales.h"
#include "wide_products.h"

namespace fattn {

typedef ColumnShare<0, kValueDim> ValueColumns;
typedef RunOf<0, kValueDim, kKvFormat>::type ValueRun;
typedef AttentionState<kRowFragments, kKeyFragments, ValueColumns::kFragments> WideAttention;

// This simdgroup's columns of the values of a step.
struct StepValues {
  ValueRun runs[kKeyFragments];

  template <bool kWhole>
  void read(int k, thread const PrefillTile& tile, thread const StepKeys& step, SeenKeys seen, ushort share)
      thread {
    const KeyPlace place = step.find(tile.source.table, k, tile.at.row);
    if (kWhole || (place.exists && seen.value(k))) {
      const StoredOperand values = tile.source.values();
      const StoredRow row = values.row_at(place, tile.params->value, tile.params->value_scales);
      runs[k].read(row, share, tile.at);
    } else {
      runs[k].clear();
    }
  }
  void read_all(thread const PrefillTile& tile, thread const StepKeys& step, ushort share) thread {
    FATTN_UNROLL
    for (int k = 0; k < kKeyFragments; k++) {
      read<true>(k, tile, step, all_seen(), share);
    }
  }
};

// After to_weights(): adds the weighted values of a step.
template <bool kWhole>
inline void add_values(thread WideAttention& attention, thread StepValues& values,
                       thread const SharedScales& scales, thread const PrefillTile& tile,
                       thread const StepKeys& step, StepFragments fragments, SeenKeys seen, ushort share) {
  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k++) {
    if (!kWhole && !fragments.has(k)) {
      continue;
    }
    scale_weights(attention, scales, k, seen, tile.at);
    if (!kWhole || !kEarlyLoads) {
      values.read<kWhole>(k, tile, step, seen, share);
    }
    Operand run[ValueRun::kElements];
    values.runs[k].unpack(run);
    attention.multiply_values(k, run);
  }
}

// Stores the scales of a step, one key per thread.
inline void put_scales(thread const SharedScales& scales, thread const PrefillTile& tile,
                       thread const StepKeys& step, ushort thread_index) {
  if (!kRowScales || !fc_scales || thread_index >= kTileKeys) {
    return;
  }
  const KeyPlace place = step.find_own(tile.source.table, thread_index);
  const bool read = place.exists;
  scales.put_key(thread_index, tile.source.key.row_scale(place, tile.params->key_scales, read));
  scales.put_value(thread_index, tile.source.value.row_scale(place, tile.params->value_scales, read));
}

// The second half of a step, after all its products are in threadgroup memory: scores, online softmax,
// weighted values. kWhole: every row sees every key.
template <bool kWhole>
inline void finish_step(thread WideAttention& attention, thread const ScoreModifiers& modifiers,
                        thread const GroupScores& scores, thread const SharedScales& scales,
                        thread const PrefillTile& tile, thread const StepKeys& step, StepView view,
                        ushort share) {
  StepValues values;
  if (kWhole && kEarlyLoads) {
    values.read_all(tile, step, share);
  }
  scores.read(attention, view.fragments, tile.at);
  scale_products(attention, scales, tile.at);
  modify_scores(attention, modifiers, step.first_key, tile.at);
  if (!kWhole) {
    const Visibility visible = tile.visible();
    hide_scores(attention, visible, tile.operands.attn_mask, step.first_key, view.present, tile.at);
  }
  const SeenKeys seen = kWhole ? all_seen() : attention.seen_keys(tile.at);
  attention.to_weights();
  add_values<kWhole>(attention, values, scales, tile, step, view.fragments, seen, share);
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_prefill_wide(
    FATTN_ATTENTION_ARGUMENTS(PrefillParams)) {
  threadgroup uint4 shared_query[kRowGroups * kGroupPieces * kSimdWidth];
  threadgroup float2 shared_products[kRowGroups * kGroupScores];  // two buffers
  threadgroup float2 shared_scales[scale_pairs(kRowScales, 2 * kTileKeys)];
  threadgroup SavedTile saved;

  const LanePosition at = lane_position(lane);
  const ushort thread_index = thread_in_group(simdgroup_index, lane);
  const ushort row_group = simdgroup_index / kColumnShares;
  const ushort share = simdgroup_index % kColumnShares;
  const int row = row_group * kOwnRows;  // this simdgroup's first row in the tile
  PrefillTile tile;
  FATTN_TAKE_ARGUMENTS(tile.operands);
  tile.params = &params;
  tile.at = at;
  if (!tile.find(group_in_grid(group_in_dispatch, slice), row, saved, thread_index)) {
    return;
  }
  WideAttention attention;
  ScoreModifiers modifiers;
  GroupQuery query_rows;
  query_rows.pieces = reinterpret_cast<threadgroup Element*>(shared_query) +
                      row_group * (kGroupPieces * kSimdWidth * kPieceElements);
  attention.clear();
  FATTN_UNROLL
  for (int r = 0; r < kRowFragments; r++) {
    tile.begin_row(r, attention, modifiers, share == 0 && at.pair == 0);
    const int pair = r * 8 + at.pair * 2;
    query_rows.stage(r, tile.query_row(pair), tile.query_row(pair + 1), share, lane, at);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // rows and query have been saved

  int place = 0;
  for (int first_key = tile.first_step(); first_key < tile.ranges.end;
       first_key = tile.step_after(first_key)) {
    GroupScores scores;
    scores.products = reinterpret_cast<threadgroup float*>(shared_products) +
                      (place * kRowGroups + row_group) * kGroupScores;
    SharedScales scales;
    scales.pairs = shared_scales + place * kTileKeys;
    place ^= 1;

    StepKeys step;
    const KeyTable table = tile.source.blocks();
    step.look_up(table, first_key, lane);
    const StepView view = tile.view_of(first_key, step.exist(table, lane));
    put_scales(scales, tile, step, thread_index);
    if (view.whole) {
      store_products<true>(scores, query_rows, tile, step, all_fragments(), share);
    } else if (view.fragments.any()) {
      store_products<false>(scores, query_rows, tile, step, view.fragments, share);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all products are written
    if (view.whole) {
      finish_step<true>(attention, modifiers, scores, scales, tile, step, whole_sight(), share);
    } else if (view.fragments.any()) {
      finish_step<false>(attention, modifiers, scores, scales, tile, step, view, share);
    }
  }
  attention.finish();
  store_rows<ValueColumns>(attention, tile, tile, share, at);
}
