// Prefill with heads that are too wide for the registers of one simdgroup.
//
// What goes in and out, and how rows are packed, is as in prefill.metal. Here kColumnShares simdgroups work
// on the same kRowFragments * 8 rows: each holds its columns of the output in registers. A step:
//
//   each simdgroup   its part of the keys x query -> threadgroup memory
//   each simdgroup   modifiers, visibility and weights of all scores; weights x values of its columns
//
// The query stands in threadgroup memory, where all simdgroups of its rows take it from. Keys and values come
// straight from the cache: a simdgroup reads its keys and its columns of the values once for all of its rows,
// and the kRowGroups simdgroups that read the same do so in the same step. Products have two places that take
// turns, so one barrier per step is enough: whoever writes one place has waited at a barrier for all readers
// of the step before last.
//
// Keys are the left factor of the first product, so that a lane reads them as it reads values (tile.h).
#define FATTN_COLUMN_SHARES (FATTN_SIMDGROUPS / FATTN_ROW_GROUPS)

#include "mapped_steps.h"
#include "../common/scales.h"
#include "wide_products.h"

namespace fattn {

typedef ColumnShare<0, kValueDim> ValueColumns;
typedef RunOf<0, kValueDim, kKvFormat>::type ValueRun;
typedef AttentionState<kRowFragments, kKeyFragments, ValueColumns::kFragments> WideAttention;

// What the simdgroups of a group tell each other in a step.
FATTN_CONSTEXPR int kGroupScores = kSumShares * kRowFragments * 8 * kTileKeys;

struct GroupScores {
  threadgroup float* products;  // [share of the columns][row fragment][key fragment][row][key]

  void put(int r, int k, ushort share, float2 of_rows, LanePosition at) const thread {
    threadgroup float* block = products + ((share * kRowFragments + r) * kKeyFragments + k) * 64;
    block[at.pair * 16 + at.row] = of_rows[0];
    block[at.pair * 16 + 8 + at.row] = of_rows[1];
  }

  // The products of those key fragments, as scores.
  void take(thread WideAttention& attention, StepFragments fragments, LanePosition at) const thread {
#pragma clang loop unroll(full)
    for (int r = 0; r < kRowFragments; r++) {
#pragma clang loop unroll(full)
      for (int k = 0; k < kKeyFragments; k++) {
        float2 sum = float2(0.0f);
        if (fragments.has(k)) {
          sum = pair(0, r, k, at);
#pragma clang loop unroll(full)
          for (int share = 1; share < kSumShares; share++) {
            sum += pair(share, r, k, at);
          }
        }
        set_elements(attention.score[r][k], sum[0], sum[1]);
      }
    }
  }

 private:
  // Of this lane's row and keys.
  float2 pair(int share, int r, int k, LanePosition at) const thread {
    const threadgroup float* block = products + ((share * kRowFragments + r) * kKeyFragments + k) * 64;
    return *reinterpret_cast<const threadgroup float2*>(block + at.row * 8 + at.pair * 2);
  }
};

// What the steps of a tile share.
struct TileKeys {
  KeySource source;
  KeyRanges ranges;  // of this simdgroup's rows

  bool whole_at(int first_key, thread const StagedKeys& places) const thread {
    return ranges.all_see(first_key, first_key + 1) && places.exist == kAllKeys;
  }
};

// This simdgroup's part of a step's products. kEdge: some key may not exist or not be visible to some row.
template <bool kEdge>
inline void put_products(thread const GroupScores& scores, thread const GroupQuery& query,
                         thread const TileKeys& keys, thread const StagedKeys& places,
                         constant PrefillParams& params, StepFragments fragments, ushort share, ushort lane,
                         LanePosition at) {
  const StoredOperand stored = keys.source.keys();
#pragma clang loop unroll(full)
  for (int own = 0; own < kOwnFragments; own++) {
    const int k = share / kSumShares * kOwnFragments + own;
    if (kEdge && !fragments.has(k)) {
      continue;
    }
    const KeyPlace place = places.find(keys.source.table, k * 8 + at.row);
    const bool there = !kEdge || place.exists;
    const StoredRow row = stored.row_at(place, params.key, params.key_scales);
    float2 totals[kRowFragments];
#pragma clang loop unroll(full)
    for (int r = 0; r < kRowFragments; r++) {
      totals[r] = float2(0.0f);
    }
    multiply_key(query, row, there, share % kSumShares, lane, at, totals);
#pragma clang loop unroll(full)
    for (int r = 0; r < kRowFragments; r++) {
      scores.put(r, k, share % kSumShares, totals[r], at);
    }
  }
}

// This simdgroup's columns of the values of a step.
struct StepValues {
  ValueRun runs[kKeyFragments];

  template <bool kEdge>
  void read(int k, thread const TileKeys& keys, thread const StagedKeys& places,
            constant PrefillParams& params, SeenKeys seen, ushort share, LanePosition at) thread {
    const KeyPlace place = places.find(keys.source.table, k * 8 + at.row);
    if (!kEdge || (place.exists && seen.value(k))) {
      const StoredOperand values = keys.source.values();
      const StoredRow row = values.row_at(place, params.value, params.value_scales);
      runs[k].read(row, share, at);
    } else {
      runs[k].clear();
    }
  }
  void read_all(thread const TileKeys& keys, thread const StagedKeys& places, constant PrefillParams& params,
                ushort share, LanePosition at) thread {
#pragma clang loop unroll(full)
    for (int k = 0; k < kKeyFragments; k++) {
      read<false>(k, keys, places, params, all_seen(), share, at);
    }
  }
};

// After `weigh`: adds the weighted values of a step.
template <bool kEdge>
inline void add_values(thread WideAttention& attention, thread StepValues& values,
                       thread const SharedScales& scales, thread const TileKeys& keys,
                       thread const StagedKeys& places, constant PrefillParams& params,
                       StepFragments fragments, SeenKeys seen, ushort share, LanePosition at) {
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    if (kEdge && !fragments.has(k)) {
      continue;
    }
    scale_weights(attention, scales, k, seen, at);
    if (kEdge || !kEarlyLoads) {
      values.read<kEdge>(k, keys, places, params, seen, share, at);
    }
    Operand run[ValueRun::kElements];
    values.runs[k].unpack(run);
    attention.multiply_values(k, run);
  }
}

// The scales of a step, by the threads that look after a key each.
inline void put_scales(thread const SharedScales& scales, thread const KeySource& source,
                       thread const StagedKeys& places, constant PrefillParams& params, ushort thread_index) {
  if (!kRowScales || !fc_scales || thread_index >= kTileKeys) {
    return;
  }
  const KeyPlace place = places.own(source.table, thread_index);
  const bool read = place.exists;
  scales.put_key(thread_index, read ? float(*source.key.scales_at(place, params.key_scales)) : 1.0f);
  scales.put_value(thread_index, read ? float(*source.value.scales_at(place, params.value_scales)) : 1.0f);
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_prefill_wide(
    const device Element* query [[buffer(fattn::kSlotQuery)]],
    const device Stored* key [[buffer(fattn::kSlotKey)]],
    const device Stored* value [[buffer(fattn::kSlotValue)]],
    device Element* out [[buffer(fattn::kSlotOut), function_constant(fc_whole)]],
    device float* lse [[buffer(fattn::kSlotLse), function_constant(fc_whole)]],
    device float* partial_out [[buffer(fattn::kSlotPartialOut), function_constant(fc_split)]],
    device float4* partial_sum [[buffer(fattn::kSlotPartialSum), function_constant(fc_split)]],
    constant PrefillParams& params [[buffer(fattn::kSlotParams)]],
    const device uchar* mask [[buffer(fattn::kSlotMask), function_constant(fc_has_mask)]],
    const device uchar* mask_map [[buffer(fattn::kSlotMaskMap), function_constant(fc_mask_map)]],
    const device int* seq_lens [[buffer(fattn::kSlotSeqLens), function_constant(fc_has_seq_lens)]],
    const device int* block_tables [[buffer(fattn::kSlotBlockTables), function_constant(fc_paged)]],
    const device uchar* sinks [[buffer(fattn::kSlotSinks), function_constant(fc_sinks)]],
    const device uchar* alibi_slopes [[buffer(fattn::kSlotAlibiSlopes), function_constant(fc_alibi)]],
    const device int* cu_seqlens [[buffer(fattn::kSlotCuSeqlens), function_constant(fc_packed)]],
    const device int* cu_seqlens_k [[buffer(fattn::kSlotCuSeqlensK), function_constant(fc_packed_keys)]],
    const device Scale* key_scales [[buffer(fattn::kSlotKeyScales), function_constant(fc_scales)]],
    const device Scale* value_scales [[buffer(fattn::kSlotValueScales), function_constant(fc_scales)]],
    constant GridSlice& slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]],
    uint3 group_in_dispatch [[threadgroup_position_in_grid]],
    ushort simdgroup_index [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint4 shared_query[kRowGroups * kGroupPieces * kSimdWidth];
  threadgroup float2 shared_products[kRowGroups * kGroupScores];  // in two places
  threadgroup float2 shared_scales[kRowScales ? 2 * kTileKeys : 1];
  threadgroup SavedStarts starts;
  threadgroup SavedPlaces saved_places[kTileRows];
  threadgroup SavedLimits saved_limits[kTileRows];

  const GridPlace here = place_in_grid(params, group_in_grid(group_in_dispatch, slice));
  const int part = here.part;
  const QueryTile tile =
      fc_packed ? packed_tile(cu_seqlens, params, here.tile, int(here.head), lane) : dense_tile(params, here);
  if (fc_packed && tile.end == 0) {
    return;
  }
  TileRows rows;
  rows.set(tile, params, seq_lens, cu_seqlens_k);
  if (thread_index == 0) {
    rows.put_starts(params, &starts);
  }
  const LanePosition at = lane_position(lane);
  const ushort row_group = simdgroup_index / kColumnShares;
  const ushort share = simdgroup_index % kColumnShares;
  const int group_row = tile.begin + row_group * (kRowFragments * 8);
  KeyRanges ranges = rows.ranges_of(tile.begin, kTileRows, params);
  int first_key = next_step(ranges, -kTileKeys, kTileKeys);
  if (fc_split) {
    first_key = take_part(ranges, params, part, kTileKeys);
    if (part > 0 && first_key >= ranges.end) {
      put_empty_part(rows, params, part, partial_sum, thread_index);
      return;
    }
  }
  TileKeys keys;
  keys.source = rows.source(params, key, value, key_scales, value_scales, block_tables, ranges, &starts);
  keys.ranges = rows.ranges_of(group_row, kRowFragments * 8, params);

  GroupQuery group_query;
  group_query.pieces = reinterpret_cast<threadgroup Element*>(shared_query) +
                       row_group * (kGroupPieces * kSimdWidth * kPieceElements);
  WideAttention attention;
  ScoreModifiers modifiers;
  TileState state;
  state.set(saved_places, saved_limits, row_group * (kRowFragments * 8) + at.row);
  attention.clear();
#pragma clang loop unroll(full)
  for (int r = 0; r < kRowFragments; r++) {
    const QueryRow row = rows.row(group_row + r * 8 + at.row, params);
    rows.set_modifiers(r, row, params, alibi_slopes, modifiers);
    if (fc_sinks && part == 0 && row.exists) {
      attention.add_sink(r, sink_of(row, params, sinks), at.pair == 0);
    }
    if (share == 0 && at.pair == 0) {
      rows.save(r, row, part, params, state);
    }
    const int pair = group_row + r * 8 + at.pair * 2;
    group_query.stage(r, rows.query_row(rows.row(pair, params), params, query),
                      rows.query_row(rows.row(pair + 1, params), params, query), share, lane, at);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  TileSteps steps;
  steps.set(ranges, rows, group_row);
  int place = 0;
  for (first_key = steps.first(first_key, rows, params, mask_map, lane); first_key < ranges.end;
       first_key = steps.after(first_key, rows, params, mask_map, lane)) {
    GroupScores scores;
    scores.products = reinterpret_cast<threadgroup float*>(shared_products) +
                      (place * kRowGroups + row_group) * kGroupScores;
    SharedScales scales;
    scales.pairs = shared_scales + place * kTileKeys;
    place ^= 1;

    StagedKeys places;
    const KeyTable table = keys.source.blocks();
    places.look_up(table, first_key, lane);
    const uint cell = steps.own_cell(first_key);
    const StepFragments fragments = step_fragments(keys.ranges, first_key, cell);
    const bool whole = cell == kCellWhole && keys.whole_at(first_key, places);
    put_scales(scales, keys.source, places, params, thread_index);
    if (whole) {
      put_products<false>(scores, group_query, keys, places, params, all_fragments(), share, lane, at);
    } else if (fragments.any()) {
      put_products<true>(scores, group_query, keys, places, params, fragments, share, lane, at);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    StepValues values;
    if (whole) {
      if (kEarlyLoads) {
        values.read_all(keys, places, params, share, at);
      }
      scores.take(attention, all_fragments(), at);
      scale_products(attention, scales, at);
      modify_scores(attention, modifiers, first_key, at);
      attention.weigh();
      add_values<false>(attention, values, scales, keys, places, params, all_fragments(), all_seen(), share,
                        at);
    } else if (fragments.any()) {
      scores.take(attention, fragments, at);
      scale_products(attention, scales, at);
      modify_scores(attention, modifiers, first_key, at);
      const Visibility visible = state.visible(params);
      hide_scores(attention, visible, mask, first_key, places.present(at.pair), at);
      const SeenKeys seen = attention.seen_keys(at);
      attention.weigh();
      add_values<true>(attention, values, scales, keys, places, params, fragments, seen, share, at);
    }
  }

  attention.finish();
#pragma clang loop unroll(full)
  for (int r = 0; r < kRowFragments; r++) {
    const long place = state.out(r);
    if (place < 0) {
      continue;
    }
    const float scale = result_scale(attention.row_sum[r]);
#pragma clang loop unroll(full)
    for (int i = 0; i < ValueColumns::kAll; i++) {
      const int column = ValueColumns::column_of(i, at.pair, share);
      if (column >= 0) {
        const float result = scaled_result(attention.out[r][i / 2].thread_elements()[i & 1], scale);
        put_result(out, partial_out, place + column, result);
      }
    }
    if (share == 0 && at.pair == 0) {
      RowSum sum = row_sum_of_weights(attention.row_max[r], attention.row_sum[r]);
      if (is_huge_sink(attention.row_max[r])) {
        sum.logit = natural_sink_of(rows.row(group_row + r * 8 + at.row, params), params, sinks);
      }
      put_sum(lse, partial_sum, state.lse(r), sum);
    }
  }
}
