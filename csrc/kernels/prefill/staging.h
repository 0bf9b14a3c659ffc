// Copies K and V of a step from the cache to threadgroup memory, where all simdgroups of a threadgroup read
// them. Each thread loads its whole part of a step at once and holds it in registers, in the stored format:
// early, while the previous step is computed, or late, when this simdgroup has finished that step.
#pragma once

#include "prefill_tile.h"
#include "../common/scales.h"

namespace fattn {

FATTN_CONSTEXPR int kKeyPitch = key_pitch(kHeadDim, kColumnShares, sizeof(TileElement));
// Whether keys 2p and 2p + 1 are interleaved, element by element, in two rows of the tile, so that the
// elements that a lane multiplies together are neighbours. A thread stages both keys. Not for quantised
// caches, where the few chunks would leave threads idle, nor for early loads, which take enough registers
// already. Kernels that also read whole rows of K define FATTN_PAIRED_KEYS as false.
#ifndef FATTN_PAIRED_KEYS
#define FATTN_PAIRED_KEYS true
#endif
FATTN_CONSTEXPR bool kPairedKeys = FATTN_PAIRED_KEYS && !kEarlyLoads && kKvFormat == kKvFloat;
FATTN_CONSTEXPR int kValuePitch = value_pitch(kValueDim, kColumnShares, sizeof(TileElement));

inline uint tile_word(float first, float, float) { return as_type<uint>(first); }
inline uint tile_word(float first, float second, half) { return as_type<uint>(half2(first, second)); }

// Neighbouring elements of a quantised row. They are decoded on the way into the tile.
template <int C>
struct StagedElements {
  static constant constexpr int kColumns = C;

  StoredChunk<C> stored;

  void clear() thread { stored.clear(); }
  void read(thread const StoredRow& row, int column) thread { stored.read(row, column, 0, fc_vector_loads); }
  // The decoded elements from index `first` on.
  uint4 tile_words(int first) const thread {
    Operand run[C];
    stored.unpack_to(run, 0);
    uint4 words;
    FATTN_UNROLL
    for (int w = 0; w < 4; w++) {
      const int at = first + w * kTileChunk / 4;
      words[w] = tile_word(float(run[at]), float(run[min(at + 1, C - 1)]), TileElement(0.0f));
    }
    return words;
  }
};

// 16 bytes of a row that is not quantised.
struct StagedWords {
  static constant constexpr int kColumns = kWideChunk;

  uint4 words;

  void clear() thread { words = uint4(0); }
  void read(thread const StoredRow& row, int column) thread { words = wide_chunk(row.floats() + column); }
  uint4 tile_words(int) const thread { return words; }
};

// 16 bytes of each of two rows, interleaved.
inline void put_interleaved(uint4 first, uint4 second, threadgroup uint4* to) {
  uint words[8];
  FATTN_UNROLL
  for (int w = 0; w < 4; w++) {
    if (sizeof(TileElement) == 4) {
      words[2 * w] = first[w];
      words[2 * w + 1] = second[w];
    } else {
      const ushort2 of_first = as_type<ushort2>(first[w]);
      const ushort2 of_second = as_type<ushort2>(second[w]);
      words[2 * w] = as_type<uint>(ushort2(of_first[0], of_second[0]));
      words[2 * w + 1] = as_type<uint>(ushort2(of_first[1], of_second[1]));
    }
  }
  to[0] = uint4(words[0], words[1], words[2], words[3]);
  to[1] = uint4(words[4], words[5], words[6], words[7]);
}

// The chunks of a row of N elements. 16 quantised elements take 32 or 64 bytes of the tile, which leaves a
// chunk for every thread.
template <int N, int kFormat>
struct StagedChunkOf {
  typedef StagedElements<chunk_of(N, 16)> type;
};
template <int N>
struct StagedChunkOf<N, kKvFloat> {
  typedef StagedWords type;
};

// The rows of one operand in a step.
struct StagedRows {
  StoredOperand operand;
  constant Strides3* strides;
  constant Strides3* scale_strides;
  int first_key;  // of the step
  long stride;    // from row to row

  // A dense row from `column` on. With vector loads, the index of a chunk fits in 32 bits: loads add it to
  // the operand's base, and threads hold no 64-bit address.
  StoredRow row_at(int key, int column) const thread {
    StoredRow row;
    if (fc_vector_loads) {
      const uint chunk = uint(ulong(operand.first) / kWideChunk) + uint(column) / kWideChunk +
                         uint(key) * uint(ulong(stride) / kWideChunk);
      row.elements = operand.elements + ulong(chunk) * kWideChunk;
    } else {
      row.elements = operand.elements + (operand.first + key * stride + column);
    }
    return row;
  }
};

// One thread's part of kTileKeys rows of N elements: some columns of rows that are kRoundRows apart. If N
// does not divide the threads, the last ones have none. kPaired: two rows each, interleaved in the tile.
template <int N, bool kPaired>
struct TileLoads {
  typedef typename StagedChunkOf<N, kKvFormat>::type Chunk;
  static constant constexpr int kRowChunks = N / Chunk::kColumns;
  static constant constexpr int kRowsTogether = kPaired ? 2 : 1;
  static constant constexpr int kRoundRows = kThreads / kRowChunks * kRowsTogether;
  static constant constexpr int kRounds = (kTileKeys + kRoundRows - 1) / kRoundRows;
  static constant constexpr int kActiveThreads = kThreads / kRowChunks * kRowChunks;
  // Whether every thread has rows in every round.
  static constant constexpr bool kEven = kThreads % kRowChunks == 0 && kTileKeys % kRoundRows == 0;

  Chunk chunks[kRounds][kRowsTogether];

  // Loads the rows of keys that some row of the tile sees by position; hidden ones are replaced by visible
  // ones. kWhole: all kTileKeys are visible. Threads without a row load another thread's: conditional loads
  // would serialise.
  template <bool kWhole>
  void fetch(thread const StagedRows& rows, thread const KeyTable& table, thread const StepKeys& step,
             ushort thread_index) thread {
    const int column = column_of(thread_index);
    const int first_row = min(row_of(thread_index), kTileKeys - kRowsTogether);
    const int own_key = rows.first_key + first_row;
    FATTN_UNROLL
    for (int i = 0; i < kRounds; i++) {
      const bool has = kEven || i + 1 < kRounds || first_row + i * kRoundRows < kTileKeys;
      FATTN_UNROLL
      for (int e = 0; e < kRowsTogether; e++) {
        const int below = (has ? i * kRoundRows : 0) + e;
        if (fc_looks_up) {
          fetch_found<kWhole>(rows, table, step, first_row + below, column, chunks[i][e]);
        } else {
          const int key = own_key + below;
          const StoredRow from = rows.row_at(kWhole ? key : table.held(key), column);
          chunks[i][e].read(from, 0);
        }
      }
    }
  }

  void write(threadgroup TileElement* tile, int pitch, ushort thread_index) const thread {
    const int first_row = row_of(thread_index);
    threadgroup TileElement* first = tile + (first_row * pitch + kRowsTogether * column_of(thread_index));
    FATTN_UNROLL
    for (int i = 0; i < kRounds; i++) {
      const bool has = first_row + i * kRoundRows < kTileKeys && thread_index < kActiveThreads;
      if (kEven || has) {
        write_rows(chunks[i], first + i * kRoundRows * pitch);
      }
    }
  }

 private:
  // A thread's row and column in the first round.
  static int row_of(ushort thread_index) { return thread_index / kRowChunks * kRowsTogether; }
  static int column_of(ushort thread_index) { return thread_index % kRowChunks * Chunk::kColumns; }

  static void write_rows(thread const Chunk (&rows)[kRowsTogether], threadgroup TileElement* to) {
    FATTN_UNROLL
    for (int i = 0; i < Chunk::kColumns; i += kTileChunk) {
      threadgroup uint4* words = reinterpret_cast<threadgroup uint4*>(to + kRowsTogether * i);
      if (kPaired) {
        put_interleaved(rows[0].tile_words(i), rows[kRowsTogether - 1].tile_words(i), words);
      } else {
        *words = rows[0].tile_words(i);
      }
    }
  }

  template <bool kWhole>
  static void fetch_found(thread const StagedRows& rows, thread const KeyTable& table,
                          thread const StepKeys& step, int row, int column, thread Chunk& found) {
    const KeyPlace place = step.find(table, row);
    const StoredRow from = rows.operand.row_at(place, *rows.strides, *rows.scale_strides);
    if (kWhole || place.exists) {
      found.read(from, column);
    } else {
      found.clear();
    }
  }
};

// The tiles in which a step is staged.
struct StepTiles {
  threadgroup TileElement* keys;
  threadgroup TileElement* values;
  SharedScales scales;
};

// A thread's part of a step; with early loads, of the next step.
struct StepLoads {
  TileLoads<kHeadDim, kPairedKeys> keys;
  TileLoads<kValueDim, false> values;
  StepKeys step;  // if keys are looked up
  uint exist;
  float key_scale;  // of this thread's key
  float value_scale;

  // Looks up the keys of the step.
  void look_up(thread const PrefillTile& tile, int first_key) thread {
    if (fc_looks_up) {
      const KeyTable table = tile.source.blocks();
      step.look_up(table, first_key, tile.at.lane);
      exist = step.exist(table, tile.at.lane);
    }
  }

  // After look-up: whether all keys of the step exist and every row of the tile sees them.
  bool is_whole(thread const PrefillTile& tile, int first_key) const thread {
    return tile.sees_whole(first_key) && existing() == kAllKeys;
  }
  // The same, for a step that only early loads have looked up.
  bool finds_whole(thread const PrefillTile& tile, int first_key) thread {
    if (!kEarlyLoads) {
      look_up(tile, first_key);
    }
    return is_whole(tile, first_key);
  }

  // Bit i: key i exists.
  uint existing() const thread { return fc_paged ? exist : kAllKeys; }

  // With early loads, loads the step at `first_key` if there is one. kMayBeWhole: whole steps are loaded
  // without tests.
  template <bool kMayBeWhole>
  void prefetch(int first_key, thread const PrefillTile& tile, ushort thread_index) thread {
    if (!kEarlyLoads || first_key >= tile.ranges.end) {
      return;
    }
    look_up(tile, first_key);
    if (kMayBeWhole && is_whole(tile, first_key)) {
      fetch<true>(tile.source, *tile.params, first_key, thread_index);
    } else {
      fetch<false>(tile.source, *tile.params, first_key, thread_index);
    }
  }

  // With early loads, loads the step after the one at `first_key`.
  void prefetch_after(int first_key, thread PrefillTile& tile, ushort thread_index) thread {
    if (kEarlyLoads) {
      prefetch<false>(tile.step_after(first_key), tile, thread_index);
    }
  }

  // Copies the step to threadgroup memory, where all simdgroups read it.
  template <bool kWhole>
  void stage(int first_key, thread const StepTiles& tiles, thread const PrefillTile& tile,
             ushort thread_index) thread {
    if (!kEarlyLoads) {
      fetch<kWhole>(tile.source, *tile.params, first_key, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step has been read
    write(tiles, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

 private:
  template <bool kWhole>
  void fetch(thread const KeySource& source, constant PrefillParams& params, int first_key,
             ushort thread_index) thread {
    const StagedRows of_keys = key_rows(source, params, first_key);
    const StagedRows of_values = value_rows(source, params, first_key);
    values.fetch<kWhole>(of_values, source.table, step, thread_index);
    keys.fetch<kWhole>(of_keys, source.table, step, thread_index);
    fetch_scales<kWhole>(source, params, thread_index);
  }

  void write(thread const StepTiles& tiles, ushort thread_index) const thread {
    if (kRowScales && fc_scales && thread_index < kTileKeys) {
      tiles.scales.put_key(thread_index, key_scale);
      tiles.scales.put_value(thread_index, value_scale);
    }
    keys.write(tiles.keys, kKeyPitch, thread_index);
    values.write(tiles.values, kValuePitch, thread_index);
  }

  StagedRows key_rows(thread const KeySource& source, constant PrefillParams& params, int first_key) const
      thread {
    return rows_of(source.keys(), params.key, params.key_scales, source.key_stride, first_key);
  }
  StagedRows value_rows(thread const KeySource& source, constant PrefillParams& params, int first_key) const
      thread {
    return rows_of(source.values(), params.value, params.value_scales, source.value_stride, first_key);
  }
  static StagedRows rows_of(StoredOperand operand, constant Strides3& strides,
                            constant Strides3& scale_strides, long stride, int first_key) {
    StagedRows rows;
    rows.operand = operand;
    rows.strides = &strides;
    rows.scale_strides = &scale_strides;
    rows.first_key = first_key;
    rows.stride = stride;
    return rows;
  }

  template <bool kWhole>
  void fetch_scales(thread const KeySource& source, constant PrefillParams& params, ushort thread_index)
      thread {
    if (kRowScales && fc_scales && thread_index < kTileKeys) {
      const KeyPlace place = step.find_own(source.table, thread_index);
      const bool read = kWhole || place.exists;
      key_scale = source.key.row_scale(place, params.key_scales, read);
      value_scale = source.value.row_scale(place, params.value_scales, read);
    }
  }
};

}  // namespace fattn
