// Where the keys of a sequence live: in one strided tensor, or in the blocks of a paged pool
// (PagedAttention: Kwon et al. 2023). And how their elements are stored: as they are, or quantised
// (plan/kv_format.h).
#pragma once

#include "config.h"

// Whether the eight keys of a fragment always lie in one block.
constant bool fc_fragment_blocks = fc_block_size % 8 == 0;

namespace fattn {

// The place of one key, in elements from the start of the operand's head.
struct KeyPlace {
  int block;  // dense: 0
  int slot;   // dense: the key itself
  bool exists;
};

struct KeyTable {
  const device int* blocks;  // this sequence's row of the block table
  long entry_stride;
  int num_blocks;
  int length;  // some row sees keys [begin, length) and [0, sink_end) of this sequence
  int begin;
  int sink_end;

  // Whether some row sees a key by its position.
  bool holds(int key) const thread { return key < length && (!fc_window || key >= begin || key < sink_end); }

  // The key, or another that some row sees by its position, where none sees this one. Its weight is 0, and
  // its value as finite as those of the keys that are seen.
  int held_key(int key) const thread {
    const int other = fc_window && sink_end > 0 ? sink_end - 1 : length - 1;
    return holds(key) ? key : other;
  }

  // The block that holds a key; -1 for a key that does not exist. A table entry outside the pool holds no
  // key: nothing is read through it. The block size is a function constant, so the division is a
  // multiplication, and a shift for the usual sizes.
  int block_of(int key) const thread {
    if (key >= length) {
      return -1;
    }
    if (!fc_paged) {
      return 0;
    }
    const int block = blocks[long(uint(key) / fc_block_size) * entry_stride];
    return block < num_blocks ? max(block, -1) : -1;
  }

  KeyPlace place_of(int key, int block) const thread {
    KeyPlace place;
    place.block = block;
    place.slot = fc_paged ? int(uint(key) % fc_block_size) : key;
    place.exists = holds(key) && block >= 0;
    return place;
  }
};

FATTN_CONSTEXPR uint kAllKeys = kTileKeys < 32 ? (1u << (kTileKeys % 32)) - 1 : ~0u;

// The keys of one step. Their blocks are looked up once for K and V.
struct StepKeys {
  int first_key;              // a multiple of kTileKeys
  int blocks[kKeyFragments];  // of each key fragment
  int own;                    // or of key number lane % kTileKeys, where a fragment may have several

  void look_up(thread const KeyTable& table, int key, ushort lane) thread {
    static_assert(kTileKeys <= kSimdWidth, "a lane looks up one key");
    first_key = key;
    if (!fc_paged) {
      return;
    }
    if (!fc_fragment_blocks) {
      own = table.block_of(key + lane % kTileKeys);
      return;
    }
#pragma clang loop unroll(full)
    for (int k = 0; k < kKeyFragments; k++) {
      const bool in_block_before = k > 0 && (fc_block_size % kTileKeys == 0 ||
                                             (kTileKeys % fc_block_size == 0 && k * 8 % fc_block_size != 0));
      blocks[k] = in_block_before ? blocks[max(k - 1, 0)] : table.block_of(key + k * 8);
    }
  }

  // Whether every key has a block.
  bool have_blocks() const thread {
    bool all = true;
    if (!fc_paged) {
      return all;
    }
    if (!fc_fragment_blocks) {
      return simd_all(own >= 0);
    }
#pragma clang loop unroll(full)
    for (int k = 0; k < kKeyFragments; k++) {
      all = all && blocks[k] >= 0;
    }
    return all;
  }

  // In all lanes at once: the place of key n of fragment k, of which each lane may ask for another n.
  KeyPlace find(thread const KeyTable& table, int k, int n) const thread {
    int block = 0;
    if (fc_paged) {
      block = fc_fragment_blocks ? blocks[k] : simd_shuffle(own, ushort(k * 8 + n));
    }
    return table.place_of(first_key + k * 8 + n, block);
  }

  // In all lanes at once: the place of key number i of the step, of which each lane may ask for another.
  KeyPlace find(thread const KeyTable& table, int i) const thread {
    int block = 0;
    if (fc_paged) {
      block = fc_fragment_blocks ? block_of_fragment(i / 8) : simd_shuffle(own, ushort(i));
    }
    return table.place_of(first_key + i, block);
  }

  // The place of key number lane % kTileKeys.
  KeyPlace find_own(thread const KeyTable& table, ushort lane) const thread {
    const int i = lane % kTileKeys;
    int block = 0;
    if (fc_paged) {
      block = fc_fragment_blocks ? block_of_fragment(i / 8) : own;
    }
    return table.place_of(first_key + i, block);
  }

  // Bit i of the result: key number i exists, as far as the limits of the rows do not say it anyway.
  uint exist(thread const KeyTable& table, ushort lane) const thread {
    if (!fc_paged) {
      return kAllKeys;
    }
    const bool own_exists = find_own(table, lane).exists;
    return uint(simd_vote::vote_t(simd_ballot(own_exists))) & kAllKeys;
  }

 private:
  int block_of_fragment(int index) const thread {
    int block = blocks[0];
#pragma clang loop unroll(full)
    for (int k = 1; k < kKeyFragments; k++) {  // not indexed: registers have no addresses
      block = index == k ? blocks[k] : block;
    }
    return block;
  }
};

// Of the bits of a step's keys those whose scores a lane holds, as hide_scores takes them.
inline uint present_keys(uint exist, ushort pair) {
  uint bits = 0;
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    bits |= ((exist >> (k * 8 + pair * 2)) & 3) << (2 * k);
  }
  return bits;
}

// What the pointers and strides of K and V count, and what their scales are made of.
template <int kFormat>
struct StorageOf {  // int8 and fp8_e4m3
  typedef uchar element;
  typedef float scale;
};
template <>
struct StorageOf<kKvFloat> {
  typedef Element element;
  typedef float scale;
};
template <>
struct StorageOf<kKvInt4> {
  typedef uchar element;
  typedef half scale;
};
typedef StorageOf<kKvFormat>::element Stored;
typedef StorageOf<kKvFormat>::scale Scale;

FATTN_CONSTEXPR int kStoredWordElements = kKvFormat == kKvInt4 ? 8 : 4 / sizeof(Stored);
FATTN_CONSTEXPR bool kRowScales = kKvFormat == kKvInt8 || kKvFormat == kKvFp8E4M3;

// Of the n elements in a word those with numbers k and k + n / 2. Exact: all of them are halves.
inline half2 stored_pair(uint word, int k) {
  if (kKvFormat == kKvInt4 || kKvFormat == kKvInt8) {
    // The last bit of a half from 1024 to 2047 counts ones. The sign bit of an int8, flipped, adds 128.
    const uint bits = kKvFormat == kKvInt4 ? (word >> (4 * k)) & 0x000f000f : (word >> (8 * k)) & 0x00ff00ff;
    const uint origin = kKvFormat == kKvInt4 ? 0x64006400 : 0x64806480;
    return as_type<half2>(bits ^ origin) - as_type<half2>(origin);
  }
  // fp8_e4m3 has a shorter exponent than half, and its bias is less by 8. The sign is moved up by an
  // addition. The largest magnitude is a NaN: one more carries into the bit that completes a half's exponent
  // of ones.
  const uint shifted = (k == 0 ? word << 7 : word >> 1) & 0x7f807f80;
  const uint small = shifted + (shifted & 0x40004000);
  const uint scale = 0x5c005c00;  // 2^8
  return as_type<half2>(small | ((small + 0x00800080) & 0x40004000)) * as_type<half2>(scale);
}

// The first N elements in a word. `group`: scale and minimum of an int4 group.
template <int N>
inline void unpack_stored(uint word, half2 group, thread Operand (&run)[N]) {
  constexpr int kHalf = kStoredWordElements / 2;
#pragma clang loop unroll(full)
  for (int k = 0; k < kHalf && k < N; k++) {
    float2 pair = float2(stored_pair(word, k));
    if (kKvFormat == kKvInt4) {
      pair = fma(pair, float2(group[0]), float2(group[1]));
    }
    run[k] = Operand(pair[0]);
    if (k + kHalf < N) {
      run[min(k + kHalf, N - 1)] = Operand(pair[1]);
    }
  }
}

// A row of K or V in the cache.
struct StoredRow {
  const device Stored* elements;
  const device Scale* groups;  // int4: scale and minimum of each kInt4Group columns

  // Of a cache that is not quantised.
  const device Element* floats() const thread { return reinterpret_cast<const device Element*>(elements); }

  half2 group_of(int column, bool aligned) const thread {
    if (kKvFormat != kKvInt4) {
      return half2(0.0f);
    }
    const device Scale* group = groups + column / kInt4Group * 2;
    return aligned ? *reinterpret_cast<const device half2*>(group) : half2(group[0], group[1]);
  }
};

// K or V of one sequence and head.
struct StoredOperand {
  const device Stored* elements;
  long first;                  // element; apart from the pointer, where that is held anyway
  const device Scale* scales;  // of all sequences and heads: one pointer less to hold
  uint batch;
  uint head;

  const device Scale* scales_at(KeyPlace place, constant Strides3& strides) const thread {
    return scales + (fc_paged ? uint(place.block) : batch) * strides.batch + head * strides.head +
           uint(place.slot) * strides.row;
  }

  StoredRow row_at(KeyPlace place, constant Strides3& strides, constant Strides3& scale_strides) const
      thread {
    StoredRow row;
    row.elements = elements + (first + uint(place.block) * strides.batch + uint(place.slot) * strides.row);
    if (kKvFormat == kKvInt4) {
      row.groups = scales_at(place, scale_strides);
    }
    return row;
  }
};

}  // namespace fattn
