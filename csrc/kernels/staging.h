// K and V of a step on their way from the cache to threadgroup memory, where all simdgroups of a threadgroup
// read them. While a step is computed, each thread holds its share of the next one in registers, as it is
// stored.
#pragma once

#include "prefill_rows.h"
#include "scales.h"

namespace fattn {

FATTN_CONSTEXPR int kKeyPitch = kHeadDim + kKeyPadBytes / int(sizeof(TileElement));
FATTN_CONSTEXPR int kValuePitch = kValueDim + kValuePadBytes / int(sizeof(TileElement));

inline uint tile_word(float first, float, float) { return as_type<uint>(first); }
inline uint tile_word(float first, float second, half) { return as_type<uint>(half2(first, second)); }

// Neighbouring elements of a quantised row, which become elements of the tile when they are placed there.
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
  void unpack(thread Operand (&run)[kWideChunk]) const thread {
#pragma clang loop unroll(full)
    for (int w = 0; w < 4; w++) {
      fattn::unpack(words[w], run, w * kWordElements, Element(0.0f));
    }
  }
  void put(threadgroup TileElement* to) const thread { *reinterpret_cast<threadgroup uint4*>(to) = words; }
};

// Of a row of N elements. 16 of a quantised one are 32 or 64 bytes of the tile, and enough for all threads.
template <int N, int kFormat>
struct StagedChunkOf {
  typedef StagedElements<chunk_of(N, 16)> type;
};
template <int N>
struct StagedChunkOf<N, kKvFloat> {
  typedef StagedWords type;
};

// One thread's share of kTileKeys rows of N elements.
template <int N>
struct TileShare {
  typedef typename StagedChunkOf<N, kKvFormat>::type Chunk;
  static constant constexpr int kRowChunks = N / Chunk::kColumns;
  static constant constexpr int kTileChunks = kTileKeys * kRowChunks;

  Chunk chunks[(kTileChunks + kThreads - 1) / kThreads];

  // Of a dense operand the rows before `rows`, of a pool the keys that exist; the others become 0, and are
  // not read. kWhole: all kTileKeys of them.
  template <bool kWhole>
  void fetch(thread const StoredOperand& source, constant Strides3& strides, constant Strides3& scale_strides,
             int rows, thread const KeyTable& table, thread const StagedKeys& keys, ushort thread_index)
      thread {
#pragma clang loop unroll(full)
    for (int i = 0; i < kTileChunks; i += kThreads) {
      const int row = (i + thread_index) / kRowChunks;
      const int column = (i + thread_index) % kRowChunks * Chunk::kColumns;
      bool exists = row < (kWhole ? kTileKeys : min(rows, kTileKeys));
      StoredRow from;
      if (fc_paged) {
        const KeyPlace place = keys.find(table, min(row, kTileKeys - 1));
        exists = row < kTileKeys && (kWhole || place.exists);
        from = source.row_at(place, strides, scale_strides);
      } else {
        from.elements = source.elements + row * strides.row;
      }
      exists = exists || (kWhole && kTileChunks % kThreads == 0);
      if (exists) {
        chunks[i / kThreads].read(from, column);
      } else {
        chunks[i / kThreads].clear();
      }
    }
  }

  void place(threadgroup TileElement* tile, int pitch, ushort thread_index) const thread {
#pragma clang loop unroll(full)
    for (int i = 0; i < kTileChunks; i += kThreads) {
      const int row = (i + thread_index) / kRowChunks;
      const int column = (i + thread_index) % kRowChunks * Chunk::kColumns;
      if (kTileChunks % kThreads == 0 || row < kTileKeys) {
        chunks[i / kThreads].put(tile + row * pitch + column);
      }
    }
  }

  bool has_special_values() const thread {
    float seen = 0.0f;
    if (kSpecialElements) {
#pragma clang loop unroll(full)
      for (int i = 0; i < kTileChunks; i += kThreads) {
        Operand elements[Chunk::kColumns];
        chunks[i / kThreads].unpack(elements);
        seen = special_values(elements, seen);
      }
    }
    return isnan(seen);
  }
};

// Where a step is staged.
struct StepTiles {
  threadgroup TileElement* keys;
  threadgroup TileElement* values;
  SharedScales scales;
};

// What a thread holds of the next step.
struct StepShare {
  TileShare<kHeadDim> keys;
  TileShare<kValueDim> values;
  StagedKeys places;  // of a pool
  float key_scale;    // of the key that this thread looks after
  float value_scale;

  // Finds the step's keys. Returns whether they are all there, and seen by every row of the tile.
  bool look_up(thread const KeySource& source, thread const KeyRanges& ranges, int first_key, ushort lane)
      thread {
    if (fc_paged) {
      places.look_up(source.table, first_key, lane);
    }
    return is_whole(ranges, first_key);
  }

  bool is_whole(thread const KeyRanges& ranges, int first_key) const thread {
    return ranges.all_see(first_key, first_key + 1) && (!fc_paged || places.exist == kAllKeys);
  }

  template <bool kWhole>
  void fetch(thread const KeySource& source, constant PrefillParams& params, int first_key,
             ushort thread_index) thread {
    const int rows = (fc_packed_keys ? source.table.length : params.kv_len) - first_key;
    StoredOperand key = source.key;
    StoredOperand value = source.value;
    if (!fc_paged) {
      key.elements += first_key * params.key.row;
      value.elements += first_key * params.value.row;
    }
    keys.fetch<kWhole>(key, params.key, params.key_scales, rows, source.table, places, thread_index);
    values.fetch<kWhole>(value, params.value, params.value_scales, rows, source.table, places, thread_index);
    if (kRowScales && fc_scales && thread_index < kTileKeys) {
      const KeyPlace place = places.own(source.table, thread_index);
      const bool read = kWhole || place.exists;
      key_scale = read ? float(*source.key.scales_at(place, params.key_scales)) : 1.0f;
      value_scale = read ? float(*source.value.scales_at(place, params.value_scales)) : 1.0f;
    }
  }

  void place(thread const StepTiles& tiles, ushort thread_index) const thread {
    keys.place(tiles.keys, kKeyPitch, thread_index);
    values.place(tiles.values, kValuePitch, thread_index);
    if (kRowScales && fc_scales && thread_index < kTileKeys) {
      tiles.scales.put_key(thread_index, key_scale);
      tiles.scales.put_value(thread_index, value_scale);
    }
  }
};

}  // namespace fattn
