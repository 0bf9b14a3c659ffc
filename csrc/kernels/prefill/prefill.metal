// Prefill: many query rows over keys and values that are dense, packed or in a paged pool, and may be
// quantised (FlashAttention-2: Dao 2023; the tile follows MLX's "steel" attention).
//
// A threadgroup has kSimdgroups * kRowFragments * 8 query rows of one head, or of the heads that share a
// key-value head (packed.h), and visits the keys in steps of kTileKeys. K and V of a step are staged once in
// threadgroup memory; query, scores, weights and output stay in registers. With early loads, each thread
// loads its part of the next step into registers before a step is computed.
//
// Only steps on the diagonal, at the edges of a window, at the ragged end, in missing blocks or under an
// attn_mask test visibility. Steps that are hidden from every row, by position or by a mask map
// (mapped_steps.h), are not visited. If there are few tiles, several threadgroups share the steps of one
// (take_part in steps.h), and merge.metal merges their results.
#define FATTN_STAGED 1

#include "../common/query.h"
#include "staging.h"

namespace fattn {

// Key fragments that a step with hidden keys skips together: a test per fragment would cost more than it
// saves.
FATTN_CONSTEXPR int kSkippedTogether = chunk_of(kKeyFragments, 2);
// Key fragments whose products are interleaved, and elements of V per load: many to hide the latency of
// products and loads, few to save registers.
FATTN_CONSTEXPR bool kWidened = kKvFormat == kKvFloat && sizeof(Operand) > sizeof(Element);
FATTN_CONSTEXPR int kKeysTogether =
    kEarlyLoads || (kHeadDim > 64 && !kWidened) ? chunk_of(kKeyFragments, 2) : 1;
FATTN_CONSTEXPR int kValueRun = kEarlyLoads ? kValueDim / 4 : chunk_of(kValueDim / 4, 16);

// This lane's chunk c of two neighbouring keys.
inline void read_two_keys(const threadgroup TileElement* row, int c, LanePosition at,
                          thread Operand (&first)[kKeyChunk], thread Operand (&second)[kKeyChunk]) {
  if (!kPairedKeys) {
    read_key(row, c * kKeyChunk, true, at, first);
    read_key(row + kKeyPitch, c * kKeyChunk, true, at, second);
    return;
  }
  Operand both[2 * kKeyChunk];
  read_chunks<2 * kKeyChunk>(row + at.row * (2 * kKeyChunk), c * 16 * kKeyChunk, 0, true, both);
  FATTN_UNROLL
  for (int i = 0; i < kKeyChunk; i++) {
    first[i] = both[2 * i];
    second[i] = both[2 * i + 1];
  }
}

// Adds the products with kKeysTogether key fragments of a staged step, from fragment k on.
inline void score_fragments(thread OnlineAttention& attention, thread const QueryRegisters& query,
                            thread const StepTiles& tiles, int k, LanePosition at) {
  FATTN_UNROLL
  for (int c = 0; c < kKeyChunks; c++) {
    Operand first[kKeysTogether][kKeyChunk];
    Operand second[kKeysTogether][kKeyChunk];
    FATTN_UNROLL
    for (int i = 0; i < kKeysTogether; i++) {
      const threadgroup TileElement* row = tiles.keys + ((k + i) * 8 + at.pair * 2) * kKeyPitch;
      read_two_keys(row, c, at, first[i], second[i]);
    }
    attention.multiply_key_chunk(query, c, k, first, second);
  }
}

// The products of a staged step. Key fragments outside `fragments` are hidden from this simdgroup.
inline void score_step(thread OnlineAttention& attention, thread const QueryRegisters& query,
                       thread const StepTiles& tiles, StepFragments fragments, LanePosition at) {
  attention.clear_scores();
  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k += kSkippedTogether) {
    if (!fragments.has_some(k, kSkippedTogether)) {
      continue;
    }
    FATTN_UNROLL
    for (int i = 0; i < kSkippedTogether; i += kKeysTogether) {
      score_fragments(attention, query, tiles, k + i, at);
    }
  }
  scale_products(attention, tiles.scales, at);
}

// Adds the weighted values of key fragment k. `other`: this lane's part of the value of some seen key.
inline void value_fragment(thread OnlineAttention& attention, thread const StepTiles& tiles, int k,
                           SeenKeys seen, const threadgroup TileElement* own,
                           const threadgroup TileElement* other) {
  // Read a visible value instead of a hidden one: its weights are 0, but 0 * NaN is NaN.
  const threadgroup TileElement* row = !fc_hides_any || seen.value(k) ? own + k * 8 * kValuePitch : other;
  FATTN_UNROLL
  for (int i = 0; i < kValueDim / 4; i += kValueRun) {
    Operand run[kValueRun];
    read_chunks<kValueChunk>(row, i * 4, 4 * kValueChunk, true, run);
    attention.multiply_values(k, run, i / 2);
  }
}

inline void value_step(thread OnlineAttention& attention, thread const StepTiles& tiles,
                       StepFragments fragments, SeenKeys seen, LanePosition at) {
  // Lane-dependent part of the address.
  const threadgroup TileElement* own = tiles.values + (at.row * kValuePitch + at.pair * kValueChunk);
  const int other = fc_hides_any ? seen.some_key() : 0;
  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k += kSkippedTogether) {
    if (fc_hides_any ? !seen.some(k, kSkippedTogether) : !fragments.has_some(k, kSkippedTogether)) {
      continue;
    }
    FATTN_UNROLL
    for (int i = 0; i < kSkippedTogether; i++) {
      scale_weights(attention, tiles.scales, k + i, seen, at);
      value_fragment(attention, tiles, k + i, seen, own,
                     tiles.values + (other * kValuePitch + at.pair * kValueChunk));
    }
  }
}

// One step: scores, online softmax, weighted values. kWhole: every row sees every key.
template <bool kWhole>
inline void prefill_step(thread OnlineAttention& attention, thread const QueryRegisters& query,
                         thread const ScoreModifiers& modifiers, thread const StepTiles& tiles,
                         thread const PrefillTile& tile, int first_key, StepView view, LanePosition at) {
  score_step(attention, query, tiles, view.fragments, at);
  modify_scores(attention, modifiers, first_key, at);
  if (!kWhole) {
    const Visibility visible = tile.visible();
    hide_scores(attention, visible, tile.operands.attn_mask, first_key, view.present, at);
  }
  const SeenKeys seen = kWhole ? all_seen() : attention.seen_keys(at);
  attention.to_weights();
  value_step(attention, tiles, view.fragments, seen, at);
}

// A step that every row of the tile sees whole.
inline void whole_step(thread OnlineAttention& attention, thread const QueryRegisters& query,
                       thread const ScoreModifiers& modifiers, thread const StepTiles& tiles,
                       thread StepLoads& next, thread PrefillTile& tile, int first_key, ushort thread_index) {
  next.stage<true>(first_key, tiles, tile, thread_index);
  if (fc_alternating) {
    next.prefetch_after(first_key, tile, thread_index);
  } else {
    next.prefetch<true>(tile.step_after(first_key), tile, thread_index);
  }
  if (tile.state.own_ranges().end > 0) {
    prefill_step<true>(attention, query, modifiers, tiles, tile, first_key, whole_sight(), tile.at);
  }
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_prefill(
    FATTN_ATTENTION_ARGUMENTS(PrefillParams)) {
  // uint4 for its alignment.
  threadgroup uint4 key_storage[kTileKeys * kKeyPitch / kTileChunk];
  threadgroup uint4 value_storage[kTileKeys * kValuePitch / kTileChunk];
  threadgroup float2 shared_scales[scale_pairs(kRowScales, kTileKeys)];
  threadgroup SavedTile saved;
  StepTiles tiles;
  tiles.keys = reinterpret_cast<threadgroup TileElement*>(key_storage);
  tiles.values = reinterpret_cast<threadgroup TileElement*>(value_storage);
  tiles.scales.pairs = shared_scales;

  const LanePosition at = lane_position(lane);
  const ushort thread_index = thread_in_group(simdgroup_index, lane);
  const int row = simdgroup_index * kOwnRows;  // this simdgroup's first row in the tile
  PrefillTile tile;
  FATTN_TAKE_ARGUMENTS(tile.operands);
  tile.params = &params;
  tile.at = at;
  if (!tile.find(group_in_grid(group_in_dispatch, slice), row, saved, thread_index)) {
    return;
  }
  OnlineAttention attention;
  ScoreModifiers modifiers;
  QueryRegisters query_rows;
  attention.clear();
  FATTN_UNROLL
  for (int r = 0; r < kRowFragments; r++) {
    query_rows.load(r, tile.query_row(r * 8 + at.row), at);
    tile.begin_row(r, attention, modifiers, at.pair == 0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the rows have been saved

  StepLoads next;  // of K and V
  int first_key = tile.first_step();
  next.prefetch<true>(first_key, tile, thread_index);
  // Steps that every row of the tile sees whole.
  for (; !fc_alternating && next.is_whole(tile, first_key); first_key = tile.step_after(first_key)) {
    whole_step(attention, query_rows, modifiers, tiles, next, tile, first_key, thread_index);
  }
  // Steps with keys that may be hidden from some row, and whole steps between them.
  for (; first_key < tile.ranges.end; first_key = tile.step_after(first_key)) {
    if (fc_alternating && next.finds_whole(tile, first_key)) {
      whole_step(attention, query_rows, modifiers, tiles, next, tile, first_key, thread_index);
      continue;
    }
    next.stage<false>(first_key, tiles, tile, thread_index);
    const StepView view = tile.view_of(first_key, next.existing());
    next.prefetch_after(first_key, tile, thread_index);
    if (view.fragments.any()) {
      prefill_step<false>(attention, query_rows, modifiers, tiles, tile, first_key, view, at);
    }
  }
  attention.finish();
  store_rows<WholeRow>(attention, tile, tile, 0, at);
}
