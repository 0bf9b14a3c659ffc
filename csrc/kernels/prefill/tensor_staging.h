// Copies to threadgroup memory, for the tensor kernels whose tiles are query rows: the query of a tile, once,
// and keys and values that a product cannot read in place: keys hidden from all rows of the tile (their
// memory may hold NaN or belong to no block), keys of several cache blocks, and heads that need padding.
#pragma once

#include "prefill_tile.h"
#include "tensor_products.h"

namespace fattn {

FATTN_CONSTEXPR int kStepChunks = kTileKeys * kRowChunks;
// A bit for each key of a product.
FATTN_CONSTEXPR uint kProductBits = kProductKeys < 32 ? (1u << (kProductKeys % 32)) - 1 : ~0u;

// The saved state of a row of this simdgroup.
inline TileState saved_of(thread const PrefillTile& tile, int row) {
  TileState state = tile.state;
  state.row = ushort(tile.state.row + row);
  return state;
}

// Saves visibility, place of results and score modifiers of this simdgroup's rows.
inline void save_rows(thread const PrefillTile& tile, threadgroup SavedTensorRow* rows) {
  if (tile.at.lane == 0) {
    tile.state.put_ranges(tile.rows.ranges_of(tile.first_row, kOwnRows, *tile.params));
  }
  const int row = tile.at.lane;
  if (row < kOwnRows) {
    const QueryRow at = tile.own_row(row);
    const TileState saved = saved_of(tile, row);
    tile.rows.save(0, at, tile.part, *tile.params, saved);
    ScoreModifiers of_row;
    tile.rows.set_modifiers(0, at, tile.operands, *tile.params, of_row);
    rows[row].slope = fc_alibi ? of_row.slope[0] : 0.0f;
    rows[row].position = of_row.position[0];
    if (fc_tree) {
      rows[row].drafts = at.exists ? tile.drafts_of(at) : 0;
    }
  }
}

inline ScoreModifiers modifiers_of(const threadgroup SavedTensorRow& row, constant PrefillParams& params) {
  ScoreModifiers modifiers;
  set_uniform(modifiers, params);
  if (fc_alibi) {
    modifiers.slope[0] = row.slope;
    modifiers.position[0] = row.position;
  }
  return modifiers;
}

// Copies the query rows of a tile, or similar rows. Rows that do not exist, and padding columns, become 0.
inline void stage_rows(threadgroup uint4* to, const device Element* from, constant Strides3& strides,
                       thread const PrefillTile& tile, ushort thread_index) {
  for (int c = thread_index; c < kTileRows * kRowChunks; c += kThreads) {
    const int column = c % kRowChunks * kChunk;
    const QueryRow at = tile.rows.row(tile.rows.tile.begin + c / kRowChunks, *tile.params);
    const bool exists = at.exists && column < kHeadDim;
    to[c] = exists ? chunk_at(from + tile.rows.row_offset(at, strides), column) : uint4(0);
  }
}

// Copies columns of the keys of a product, from key `first` of the step on. Keys that do not exist or whose
// bit of the step is not in `kept`, and padding columns, become 0. All lanes must call it.
template <int kColumns>
inline void stage_piece(threadgroup uint4* to, StoredOperand operand, constant Strides3& strides,
                        thread const PrefillTile& tile, thread const StepKeys& step, int first,
                        int first_column, uint kept, ushort thread_index) {
  constexpr int kChunks = kColumns / kChunk;
  constexpr int kRounds = kProductKeys * kChunks / kThreads;
  static_assert(kRounds * kThreads == kProductKeys * kChunks, "all lanes look up keys together");
  FATTN_UNROLL
  for (int round = 0; round < kRounds; round++) {
    const int c = round * kThreads + thread_index;
    const int key = first + c / kChunks;
    const int column = first_column + c % kChunks * kChunk;
    const KeyPlace place = step.find(tile.source.table, key);
    uint4 chunk = uint4(0);
    if (place.exists && ((kept >> key) & 1) && column < kHeadDim) {
      const StoredRow row = operand.row_at(place, strides, strides);
      chunk = chunk_at(row.floats(), column);
    }
    to[c] = chunk;
  }
}
// Whole rows of all keys of a step.
inline void stage_step(threadgroup uint4* to, StoredOperand operand, constant Strides3& strides,
                       thread const PrefillTile& tile, thread const StepKeys& step, uint kept,
                       ushort thread_index) {
  stage_piece<kTensorDim>(to, operand, strides, tile, step, 0, 0, kept, thread_index);
}

// Whether a product can read its keys, from `key` on, in place: some row of the tile sees each by position,
// and they have a constant stride. `exist`: their bits of StepKeys::exist(). Uniform over the threadgroup.
inline bool is_in_place(thread const PrefillTile& tile, int key, uint exist) {
  const KeyRanges ranges = tile.ranges;
  const int end = key + kProductKeys;
  const bool seen = end <= ranges.end && (!fc_window || key >= ranges.begin || end <= ranges.sink_end);
  const bool together = !fc_paged || (fc_block_size % kProductKeys == 0 && exist == kProductBits);
  return !kPadded && seen && together;
}

// The columns from `column` on of the keys or values of a product that is in place.
inline CacheTensor tensor_in_place(StoredOperand operand, constant Strides3& strides, KeyPlace first,
                                   int column, int columns) {
  const StoredRow row = operand.row_at(first, strides, strides);
  return tensor_of_rows(row.floats(), strides.row, column, columns);
}

}  // namespace fattn
