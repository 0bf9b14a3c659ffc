// Prefill: many query rows over keys and values that are dense, packed, or in a paged pool, which may be
// quantised (FlashAttention-2: Dao 2023; the tile is of the kind that MLX calls steel).
//
// A threadgroup owns kSimdgroups * kRowFragments * 8 query rows of one head, or of the heads that share a
// key-value head (packed.h), and walks the keys in steps of kTileKeys. K and V of a step are staged once in
// threadgroup memory; query, scores, weights and output stay in registers. While a step is computed, the next
// one is on its way from device memory: each thread holds its share of it in registers. Steps that every row
// of the tile sees whole are computed without any test; only the steps on the diagonal, at the edges of a
// window, at the ragged end, in blocks that do not exist, or under an attn_mask have tests. Steps that no row
// sees are not visited. With a map of the mask (mapped_steps.h) that goes by what the mask says, too. Where
// there are few tiles, several threadgroups share the steps of one (steps.h: take_part), and merge.metal adds
// up what they leave.
#define FATTN_STAGED 1

#include "mapped_steps.h"
#include "../common/query.h"
#include "staging.h"

// Whether steps that are seen whole can follow others that are not. Else they have a loop of their own, which
// needs fewer registers.
constant bool fc_alternating = fc_window || fc_paged || fc_mask_map;

namespace fattn {

// Key fragments whose products take turns, and elements of a row of V that are read at a time: more to wait
// for them less, or fewer to hold less.
FATTN_CONSTEXPR int kKeysTogether = kEarlyLoads ? chunk_of(kKeyFragments, 2) : 1;
FATTN_CONSTEXPR int kValueRun = kEarlyLoads ? kValueDim / 4 : chunk_of(kValueDim / 4, 16);

// Scores of one staged step. Key fragments that are not in `fragments` are seen by no row of this simdgroup.
inline void score_step(thread OnlineAttention& attention, thread const QueryRegisters& query,
                       thread const StepTiles& tiles, StepFragments fragments, LanePosition at) {
  attention.clear_scores();
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k += kKeysTogether) {
#pragma clang loop unroll(full)
    for (int c = 0; c < kKeyChunks; c++) {
      Operand first[kKeysTogether][kKeyChunk];
      Operand second[kKeysTogether][kKeyChunk];
#pragma clang loop unroll(full)
      for (int i = 0; i < kKeysTogether; i++) {
        const threadgroup TileElement* row = tiles.keys + ((k + i) * 8 + at.pair * 2) * kKeyPitch;
        read_key(row, c * kKeyChunk, true, at, first[i]);
        read_key(row + kKeyPitch, c * kKeyChunk, true, at, second[i]);
      }
      attention.multiply_key_chunk(query, c, k, fragments, first, second);
    }
  }
  scale_products(attention, tiles.scales, at);
}

inline void value_step(thread OnlineAttention& attention, thread const StepTiles& tiles,
                       StepFragments fragments, SeenKeys seen, LanePosition at) {
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    if (!fragments.has(k)) {
      continue;
    }
    scale_weights(attention, tiles.scales, k, seen, at);
    const threadgroup TileElement* row = tiles.values + (k * 8 + at.row) * kValuePitch;
#pragma clang loop unroll(full)
    for (int i = 0; i < kValueDim / 4; i += kValueRun) {
      Operand run[kValueRun];
      if (seen.value(k)) {
        read_value(row + i * 4, true, at, run);
      } else {
        fill_run(run, 0.0f);
      }
      attention.multiply_values(k, run, i / 2);
    }
  }
}

// The staged step of keys, all of which every row sees.
inline void whole_step(thread OnlineAttention& attention, thread const QueryRegisters& query,
                       thread const ScoreModifiers& modifiers, thread const StepTiles& tiles, int first_key,
                       LanePosition at) {
  score_step(attention, query, tiles, all_fragments(), at);
  modify_scores(attention, modifiers, first_key, at);
  attention.weigh();
  value_step(attention, tiles, all_fragments(), all_seen(), at);
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_prefill(
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
  // Declared as 16-byte words for their alignment.
  threadgroup uint4 key_storage[kTileKeys * kKeyPitch / kTileChunk];
  threadgroup uint4 value_storage[kTileKeys * kValuePitch / kTileChunk];
  threadgroup float2 shared_scales[kRowScales ? kTileKeys : 1];
  threadgroup SavedStarts starts;
  threadgroup SavedPlaces saved_places[kTileRows];
  threadgroup SavedLimits saved_limits[kTileRows];

  StepTiles tiles;
  tiles.keys = reinterpret_cast<threadgroup TileElement*>(key_storage);
  tiles.values = reinterpret_cast<threadgroup TileElement*>(value_storage);
  tiles.scales.pairs = shared_scales;

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
  const int simdgroup_row = tile.begin + simdgroup_index * (kRowFragments * 8);
  KeyRanges ranges = rows.ranges_of(tile.begin, kTileRows, params);
  int first_key = next_step(ranges, -kTileKeys, kTileKeys);
  if (fc_split) {
    first_key = take_part(ranges, params, part, kTileKeys);
    if (part > 0 && first_key >= ranges.end) {
      put_empty_part(rows, params, part, partial_sum, thread_index);
      return;
    }
  }
  const KeyRanges own_ranges = rows.ranges_of(simdgroup_row, kRowFragments * 8, params);
  const KeySource source =
      rows.source(params, key, value, key_scales, value_scales, block_tables, ranges, &starts);

  OnlineAttention attention;
  QueryRegisters query_rows;
  ScoreModifiers modifiers;
  TileState state;
  state.set(saved_places, saved_limits, simdgroup_index * (kRowFragments * 8) + at.row);
  attention.clear();
#pragma clang loop unroll(full)
  for (int r = 0; r < kRowFragments; r++) {
    const QueryRow row = rows.row(simdgroup_row + r * 8 + at.row, params);
    query_rows.load(r, rows.query_row(row, params, query), at);
    rows.set_modifiers(r, row, params, alibi_slopes, modifiers);
    if (at.pair == 0) {
      rows.save(r, row, part, params, state);
    }
    if (fc_sinks && part == 0 && row.exists) {
      attention.add_sink(r, sink_of(row, params, sinks), at.pair == 0);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  TileSteps steps;
  steps.set(ranges, rows, simdgroup_row);
  StepShare next;
  first_key = steps.first(first_key, rows, params, mask_map, lane);
  if (kEarlyLoads && first_key < ranges.end) {
    next.look_up(source, first_key, lane);
    if (next.is_whole(ranges, first_key)) {
      next.fetch<true>(source, params, first_key, thread_index);
    } else {
      next.fetch<false>(source, params, first_key, thread_index);
    }
  }

  for (; !fc_alternating && next.is_whole(ranges, first_key); first_key += kTileKeys) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step has been read
    next.place<true>(tiles, source, params, first_key, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int next_key = first_key + kTileKeys;
    if (next.is_whole(ranges, next_key)) {
      next.fetch<true>(source, params, next_key, thread_index);
    } else if (next_key < ranges.end) {
      next.fetch<false>(source, params, next_key, thread_index);
    }
    if (own_ranges.end > 0) {
      whole_step(attention, query_rows, modifiers, tiles, first_key, at);
    }
  }

  for (; first_key < ranges.end; first_key = steps.after(first_key, rows, params, mask_map, lane)) {
    if (!kEarlyLoads) {
      next.look_up(source, first_key, lane);
    }
    const uint cell = steps.own_cell(first_key);
    const bool whole = fc_alternating && next.is_whole(ranges, first_key) && steps.leaves_whole(first_key);
    const uint present = fc_paged ? next.places.present(at.pair) : ~0u;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    next.place<false>(tiles, source, params, first_key, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int next_key = steps.after(first_key, rows, params, mask_map, lane);
    if (kEarlyLoads && next_key < ranges.end) {
      next.look_up(source, next_key, lane);
      next.fetch<false>(source, params, next_key, thread_index);
    }
    const StepFragments fragments = step_fragments(own_ranges, first_key, cell);
    if (!fragments.any()) {
      continue;
    }
    // Where the map says of each simdgroup's rows what they see, one may have no tests where others do.
    const bool own_whole = cell == kCellWhole && own_ranges.all_see(first_key, first_key + 1);
    if (fc_mask_map ? own_whole : whole) {
      whole_step(attention, query_rows, modifiers, tiles, first_key, at);
    } else {
      score_step(attention, query_rows, tiles, fragments, at);
      modify_scores(attention, modifiers, first_key, at);
      const Visibility visible = state.visible(params);
      hide_scores(attention, visible, mask, first_key, present, at);
      const SeenKeys seen = attention.seen_keys(at);
      attention.weigh();
      value_step(attention, tiles, fragments, seen, at);
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
    for (int i = 0; i < kValueDim / 4; i++) {
      const float result = scaled_result(attention.out[r][i / 2].thread_elements()[i & 1], scale);
      put_result(out, partial_out, place + value_column(i, at.pair), result);
    }
    if (at.pair == 0) {
      RowSum sum = row_sum_of_weights(attention.row_max[r], attention.row_sum[r]);
      if (is_huge_sink(attention.row_max[r])) {
        sum.logit = natural_sink_of(rows.row(simdgroup_row + r * 8 + at.row, params), params, sinks);
      }
      put_sum(lse, partial_sum, state.lse(r), sum);
    }
  }
}
