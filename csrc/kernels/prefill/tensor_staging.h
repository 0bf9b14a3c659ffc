// What prefill_tensor copies to threadgroup memory: the query rows of a tile once, and keys and values of the
// steps that products cannot read where they are. These have keys that no row of the tile sees, whose memory
// may hold NaN or belong to nobody; or their keys are in several blocks; or their heads need padding.
#pragma once

#include "prefill_tile.h"
#include "tensor_products.h"

namespace fattn {

FATTN_CONSTEXPR int kChunk = 16 / sizeof(Element);  // elements of a copy
FATTN_CONSTEXPR int kRowChunks = kTensorDim / kChunk;
FATTN_CONSTEXPR int kStepChunks = kTileKeys * kRowChunks;
static_assert(kHeadDim % kChunk == 0, "a chunk is of the head, or all padding");
FATTN_CONSTEXPR int kStepRounds = kStepChunks / kThreads;
static_assert(kStepChunks % kThreads == 0, "all lanes look up keys together");

inline uint4 chunk_at(const device Element* row, int column) {
  return *reinterpret_cast<const device uint4*>(row + column);
}

// Rows that do not exist, and the columns of the padding, become 0.
inline void stage_query(threadgroup uint4* to, thread const PrefillTile& tile, ushort thread_index) {
  for (int c = thread_index; c < kTileRows * kRowChunks; c += kThreads) {
    const int column = c % kRowChunks * kChunk;
    const QueryRow at = tile.rows.row(tile.rows.tile.begin + c / kRowChunks, *tile.params);
    const device Element* row = tile.rows.query_row(at, *tile.params, tile.operands.query);
    to[c] = row && column < kHeadDim ? chunk_at(row, column) : uint4(0);
  }
}

// Keys that do not exist or are not in `kept`, by bits, become 0, as do the columns of the padding. All lanes
// must call it.
inline void stage_step(threadgroup uint4* to, StoredOperand operand, constant Strides3& strides,
                       thread const PrefillTile& tile, thread const StepKeys& step, uint kept,
                       ushort thread_index) {
#pragma clang loop unroll(full)
  for (int round = 0; round < kStepRounds; round++) {
    const int c = round * kThreads + thread_index;
    const int key = c / kRowChunks;
    const int column = c % kRowChunks * kChunk;
    const KeyPlace place = step.find(tile.source.table, key);
    uint4 chunk = uint4(0);
    if (place.exists && ((kept >> key) & 1) && column < kHeadDim) {
      const StoredRow row = operand.row_at(place, strides, strides);
      chunk = chunk_at(row.floats(), column);
    }
    to[c] = chunk;
  }
}

// Whether a product can read the keys of a step where they are: some row of the tile sees each by its
// position, and they are a constant stride apart. `exist`: see StepKeys. The same for all threads.
inline bool is_in_place(thread const PrefillTile& tile, int key, uint exist) {
  const KeyRanges ranges = tile.ranges;
  const int end = key + kTileKeys;
  const bool seen = end <= ranges.end && (!fc_window || key >= ranges.begin || end <= ranges.sink_end);
  const bool together = !fc_paged || (fc_block_size % kTileKeys == 0 && exist == kAllKeys);
  return !kPadded && seen && together;
}

// The columns from `column` on of the keys or values of a step that is in place, or that was staged.
inline CacheTensor tensor_in_place(StoredOperand operand, constant Strides3& strides, KeyPlace first,
                                   int column, int columns) {
  const StoredRow row = operand.row_at(first, strides, strides);
  const device Element* rows = row.floats() + column;
  return CacheTensor((device Element*)rows, dextents<int, 2>(columns, kTileKeys),
                     array<int, 2>{1, int(strides.row)});
}
inline SharedTensor staged_tensor(threadgroup uint4* rows, int column, int columns, int count) {
  return SharedTensor(reinterpret_cast<threadgroup Element*>(rows) + column, dextents<int, 2>(columns, count),
                      array<int, 2>{1, kTensorDim});
}

}  // namespace fattn
