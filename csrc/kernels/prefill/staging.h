// Copies K and V of a step from the cache to threadgroup memory, where all simdgroups of a threadgroup read
// them. With early loads, each thread holds its share of the next step in registers, in the stored format,
// while a step is computed.
#pragma once

#include "prefill_tile.h"
#include "../common/scales.h"

namespace fattn {

FATTN_CONSTEXPR int kKeyPitch = kHeadDim + kKeyPadBytes / int(sizeof(TileElement));
FATTN_CONSTEXPR int kValuePitch = kValueDim + kValuePadBytes / int(sizeof(TileElement));

inline uint tile_word(float first, float, float) { return as_type<uint>(first); }
inline uint tile_word(float first, float second, half) { return as_type<uint>(half2(first, second)); }

// Neighbouring elements of a quantised row, which are decoded when they are placed in the tile.
template <int C>
struct StagedElements {
  static constant constexpr int kColumns = C;

  StoredChunk<C> stored;

  void clear() thread { stored.clear(); }
  void read(thread const StoredRow& row, int column) thread { stored.read(row, column, 0, fc_vector_loads); }
  void unpack(thread Operand (&run)[C]) const thread { stored.unpack_to(run, 0); }
  void put(threadgroup TileElement* to) const thread {
    Operand run[C];
    unpack(run);
#pragma clang loop unroll(full)
    for (int i = 0; i < C; i += kTileChunk) {
      uint4 words;
#pragma clang loop unroll(full)
      for (int w = 0; w < 4; w++) {
        const int at = i + w * kTileChunk / 4;
        words[w] = tile_word(float(run[at]), float(run[min(at + 1, C - 1)]), TileElement(0.0f));
      }
      *reinterpret_cast<threadgroup uint4*>(to + i) = words;
    }
  }
};

// 16 bytes of a row that is not quantised.
struct StagedWords {
  static constant constexpr int kColumns = kWideChunk;

  uint4 words;

  void clear() thread { words = uint4(0); }
  void read(thread const StoredRow& row, int column) thread { words = wide_chunk(row.floats() + column); }
  void put(threadgroup TileElement* to) const thread { *reinterpret_cast<threadgroup uint4*>(to) = words; }
};

// The chunks of a row of N elements. 16 quantised elements become 32 or 64 bytes of the tile, and there are
// chunks for all threads.
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
  StoredOperand operand;  // dense: starts at the step's first key
  const constant Strides3* strides;
  const constant Strides3* scale_strides;
  int first_key;  // the step's
  int count;      // keys from there to the end
};

// One thread's share of kTileKeys rows of N elements.
template <int N>
struct TileShare {
  typedef typename StagedChunkOf<N, kKvFormat>::type Chunk;
  static constant constexpr int kRowChunks = N / Chunk::kColumns;
  static constant constexpr int kTileChunks = kTileKeys * kRowChunks;
  // Whether a thread's chunks are in one column of chunks; their distance is then the same in all threads.
  static constant constexpr bool kOneColumn = kThreads % kRowChunks == 0;

  Chunk chunks[kEarlyLoads ? (kTileChunks + kThreads - 1) / kThreads : 1];

  // Loads the rows of keys that some row of the tile sees by position; the others become 0 without a read.
  // kWhole: loads all kTileKeys rows.
  template <bool kWhole>
  void fetch(thread const StagedRows& rows, thread const KeyTable& table, thread const StepKeys& step,
             ushort thread_index) thread {
#pragma clang loop unroll(full)
    for (int i = 0; i < kTileChunks; i += kThreads) {
      chunks[i / kThreads] = chunk<kWhole>(rows, table, step, i, thread_index);
    }
  }

  // Stores what was fetched; without early loads, fetches and stores chunk by chunk.
  template <bool kWhole>
  void place(threadgroup TileElement* tile, int pitch, thread const StagedRows& rows,
             thread const KeyTable& table, thread const StepKeys& step, ushort thread_index) const thread {
#pragma clang loop unroll(full)
    for (int i = 0; i < kTileChunks; i += kThreads) {
      const int row = (i + thread_index) / kRowChunks;
      const int column = (i + thread_index) % kRowChunks * Chunk::kColumns;
      Chunk own;
      if (kEarlyLoads) {
        own = chunks[i / kThreads];
      } else {
        own = chunk<kWhole>(rows, table, step, i, thread_index);
      }
      if (kTileChunks % kThreads == 0 || row < kTileKeys) {
        own.put(tile + row * pitch + column);
      }
    }
  }

 private:
  // Loads chunk i + thread_index of the tile.
  template <bool kWhole>
  static Chunk chunk(thread const StagedRows& rows, thread const KeyTable& table, thread const StepKeys& step,
                     int i, ushort thread_index) {
    const int row = (i + thread_index) / kRowChunks;
    const int column = (i + thread_index) % kRowChunks * Chunk::kColumns;
    bool exists = row < (kWhole ? kTileKeys : min(rows.count, kTileKeys));
    if (!kWhole && fc_window) {
      exists = exists && table.holds(rows.first_key + row);
    }
    StoredRow from;
    if (fc_paged) {
      const KeyPlace place = step.find(table, min(row, kTileKeys - 1));
      exists = row < kTileKeys && (kWhole || place.exists);
      from = rows.operand.row_at(place, *rows.strides, *rows.scale_strides);
    } else {
      const int below = kOneColumn ? i / kRowChunks : 0;
      from.elements = rows.operand.elements + (rows.operand.first + (row - below) * rows.strides->row) +
                      below * rows.strides->row;
    }
    exists = exists || (kWhole && kTileChunks % kThreads == 0);
    Chunk found;
    if (exists) {
      found.read(from, column);
    } else {
      found.clear();
    }
    return found;
  }
};

// The tiles in which a step is staged.
struct StepTiles {
  threadgroup TileElement* keys;
  threadgroup TileElement* values;
  SharedScales scales;
};

// A thread's share of a step; with early loads, of the next step.
struct StepShare {
  TileShare<kHeadDim> keys;
  TileShare<kValueDim> values;
  StepKeys step;  // paged: its keys
  uint exist;
  float key_scale;  // of this thread's key
  float value_scale;

  // Looks up the keys of the step.
  void look_up(thread const PrefillTile& tile, int first_key) thread {
    if (fc_paged) {
      const KeyTable table = tile.source.blocks();
      step.look_up(table, first_key, tile.at.lane);
      exist = step.exist(table, tile.at.lane);
    }
  }

  // Whether all keys of the step exist and every row of the tile sees them.
  bool is_whole(thread const PrefillTile& tile, int first_key) const thread {
    return tile.ranges.all_see(first_key, first_key + 1) && existing() == kAllKeys;
  }

  // Bit i: key i exists.
  uint existing() const thread { return fc_paged ? exist : kAllKeys; }

  // With early loads, loads the step at `first_key` if there is one. kMayBeWhole: the step may be whole and
  // is then loaded without tests.
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

  // Copies the step to threadgroup memory, where all simdgroups read it.
  template <bool kWhole>
  void stage(int first_key, thread const StepTiles& tiles, thread const PrefillTile& tile,
             ushort thread_index) thread {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step has been read
    place<kWhole>(tiles, tile.source, *tile.params, first_key, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

 private:
  template <bool kWhole>
  void fetch(thread const KeySource& source, constant PrefillParams& params, int first_key,
             ushort thread_index) thread {
    if (kEarlyLoads) {
      const StagedRows of_keys = key_rows(source, params, first_key);
      const StagedRows of_values = value_rows(source, params, first_key);
      keys.fetch<kWhole>(of_keys, source.table, step, thread_index);
      values.fetch<kWhole>(of_values, source.table, step, thread_index);
      fetch_scales<kWhole>(source, params, thread_index);
    }
  }

  template <bool kWhole>
  void place(thread const StepTiles& tiles, thread const KeySource& source, constant PrefillParams& params,
             int first_key, ushort thread_index) thread {
    StagedRows late_keys;
    StagedRows late_values;
    if (!kEarlyLoads) {
      late_keys = key_rows(source, params, first_key);
      late_values = value_rows(source, params, first_key);
      fetch_scales<kWhole>(source, params, thread_index);
    }
    if (kRowScales && fc_scales && thread_index < kTileKeys) {
      tiles.scales.put_key(thread_index, key_scale);
      tiles.scales.put_value(thread_index, value_scale);
    }
    keys.place<kWhole>(tiles.keys, kKeyPitch, late_keys, source.table, step, thread_index);
    values.place<kWhole>(tiles.values, kValuePitch, late_values, source.table, step, thread_index);
  }

  StagedRows key_rows(thread const KeySource& source, constant PrefillParams& params, int first_key) const
      thread {
    return rows_of(source.keys(), params.key, params.key_scales, source, params, first_key);
  }
  StagedRows value_rows(thread const KeySource& source, constant PrefillParams& params, int first_key) const
      thread {
    return rows_of(source.values(), params.value, params.value_scales, source, params, first_key);
  }
  static StagedRows rows_of(StoredOperand operand, constant Strides3& strides,
                            constant Strides3& scale_strides, thread const KeySource& source,
                            constant PrefillParams& params, int first_key) {
    StagedRows rows;
    rows.operand = operand;
    rows.operand.first += fc_paged ? 0 : first_key * strides.row;
    rows.strides = &strides;
    rows.scale_strides = &scale_strides;
    rows.first_key = first_key;
    rows.count = source.table.length - first_key;
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
