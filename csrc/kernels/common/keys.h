// Where the keys of a sequence are stored (a strided tensor, or the blocks of a paged pool: PagedAttention,
// Kwon et al. 2023), and how their elements are encoded (plan/kv_format.h).
#pragma once

#include "config.h"

// Whether the eight keys of a fragment are always in one block.
constant bool fc_fragment_blocks = fc_block_size % 8 == 0;

namespace fattn {

// The indices of one key in its operand.
struct KeyPlace {
  int block;  // 0 if dense
  int slot;   // the key's index if dense
  bool exists;
};

struct KeyTable {
  const device int* blocks;  // this sequence's row of the block table
  long entry_stride;
  int num_blocks;
  int length;  // keys [begin, length) and [0, sink_end) are visible to some row
  int begin;
  int sink_end;

  // Whether any row sees the key by position.
  bool holds(int key) const thread { return key < length && (!fc_window || key >= begin || key < sink_end); }

  // The key, or a visible one of its step in its place if it is hidden from every row: a block mask may hide
  // other steps. The substitute has weight 0, and its value is finite if all visible values are.
  int held(int key) const thread {
    if (!fc_window) {
      return min(key, length - 1);
    }
    if (key < sink_end) {
      return key;
    }
    const bool after_sinks =
        (key < begin || begin >= length) && uint(key) / kTileKeys == uint(sink_end - 1) / kTileKeys;
    return after_sinks ? sink_end - 1 : min(max(key, begin), length - 1);
  }

  // The block of a key; -1 if the key does not exist or its table entry is outside the pool. The block size
  // is a function constant, so the compiler replaces the division by a multiplication, or by a shift for
  // powers of two.
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

// The keys of one step. K and V share one look-up of their blocks.
struct StepKeys {
  int first_key;              // a multiple of kTileKeys
  int blocks[kKeyFragments];  // of each key fragment, if fc_fragment_blocks
  int own;                    // otherwise: of key lane % kTileKeys

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
    FATTN_UNROLL
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
    FATTN_UNROLL
    for (int k = 0; k < kKeyFragments; k++) {
      all = all && blocks[k] >= 0;
    }
    return all;
  }

  // The place of key n of fragment k; n may differ between lanes. All lanes must call it.
  KeyPlace find(thread const KeyTable& table, int k, int n) const thread {
    int block = 0;
    if (fc_paged) {
      block = fc_fragment_blocks ? blocks[k] : simd_shuffle(own, ushort(k * 8 + n));
    }
    return table.place_of(first_key + k * 8 + n, block);
  }

  // The place of key i of the step; i may differ between lanes. All lanes must call it.
  KeyPlace find(thread const KeyTable& table, int i) const thread {
    int block = 0;
    if (fc_paged) {
      block = fc_fragment_blocks ? block_of_fragment(i / 8) : simd_shuffle(own, ushort(i));
    }
    return table.place_of(first_key + i, block);
  }

  // The place of key lane % kTileKeys of the step.
  KeyPlace find_own(thread const KeyTable& table, ushort lane) const thread {
    const int i = lane % kTileKeys;
    int block = 0;
    if (fc_paged) {
      block = fc_fragment_blocks ? block_of_fragment(i / 8) : own;
    }
    return table.place_of(first_key + i, block);
  }

  // Bit i: key i has a block and is visible to some row. All bits if dense, where the rows' limits suffice.
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
    FATTN_UNROLL
    for (int k = 1; k < kKeyFragments; k++) {  // select: dynamic indexing would spill
      block = index == k ? blocks[k] : block;
    }
    return block;
  }
};

// The bits of exist() for the keys whose scores this lane holds, in the order of hide_scores().
inline uint present_keys(uint exist, ushort pair) {
  uint bits = 0;
  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k++) {
    bits |= ((exist >> (k * 8 + pair * 2)) & 3) << (2 * k);
  }
  return bits;
}

// The types of stored elements and of their scales. Pointers and strides of K and V count elements.
template <int kFormat>
struct StorageOf {  // formats with one scale per row, or none
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

FATTN_CONSTEXPR int kStoredWordElements = packed_elements(kKvFormat) * (4 / sizeof(Stored));
FATTN_CONSTEXPR bool kRowScales = has_row_scales(kKvFormat);

// Codes k and k + 4 of the eight int4 codes in a word, minus `origin`. In a half from 1024 to 2047 bit 0 has
// the value 1, in a half from 64 to 127 bit 4 has: one shift serves four pairs.
inline half2 int4_pair(uint word, int k, int origin) {
  const bool low = k % 2 == 0;
  const uint bits = (k < 2 ? word : word >> 8) & (low ? 0x000f000f : 0x00f000f0);
  const uint zero = low ? 0x64006400 : 0x54005400;
  const uint one = low ? 0x00010001 : 0x00100010;
  return as_type<half2>(bits ^ zero) - as_type<half2>(zero + uint(origin) * one);
}

// The same plus 64, which an FMA removes.
inline half2 int4_codes(uint word, int k) {
  const uint moved = k == 0 ? word << 4 : word >> (4 * k - 4);
  return as_type<half2>((moved & 0x00f000f0) | 0x54005400);
}

// Elements k and k + n / 2 of the n elements in a word of int8 or fp8. All codes are exact in half.
inline half2 stored_pair(uint word, int k) {
  if (kKvFormat == kKvInt8) {
    // As above. Flipping the sign bit of a code adds 128.
    const uint zero = 0x64806480;
    return as_type<half2>(((word >> (8 * k)) & 0x00ff00ff) ^ zero) - as_type<half2>(zero);
  }
  static_assert(kKvFormat == kKvFloat ||  // not quantised
                    kKvFormat == kKvInt4 || kKvFormat == kKvInt8 || kKvFormat == kKvFp8E4M3,
                "stored_pair lacks this format");
  // fp8_e4m3 to half. Exponent and mantissa move to bits 13 to 7; the sign moves to bit 14, and the addition
  // carries it to bit 15. The exponent biases are 7 and 15, so the result is scaled by 2^8. The largest
  // magnitude is NaN: adding 1 carries into bit 14 and sets all bits of half's exponent.
  const uint shifted = (k == 0 ? word << 7 : word >> 1) & 0x7f807f80;
  const uint small = shifted + (shifted & 0x40004000);
  const uint scale = 0x5c005c00;  // 2^8
  return as_type<half2>(small | ((small + 0x00800080) & 0x40004000)) * as_type<half2>(scale);
}

// Elements k and k + n / 2 of a word. `group`: scale and minimum of an int4 group.
inline float2 stored_values(uint word, int k, half2 group) {
  if (kKvFormat == kKvInt4) {
    // Subtract the 64 from the minimum, once for all elements of a group. Where this rounds, the minimum is
    // less than a hundredth of the scale, and the error less than 2^-18 of the scale.
    const float minimum = fma(-64.0f, float(group[0]), float(group[1]));
    return fma(float2(int4_codes(word, k)), float2(group[0]), float2(minimum));
  }
  return float2(stored_pair(word, k));
}

// Decodes the first N elements of a word.
template <int N>
inline void unpack_stored(uint word, half2 group, thread Operand (&run)[N]) {
  constexpr int kHalf = kStoredWordElements / 2;
  FATTN_UNROLL
  for (int k = 0; k < kHalf && k < N; k++) {
    const float2 pair = stored_values(word, k, group);
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

  // The elements of a cache that is not quantised.
  const device Element* floats() const thread { return reinterpret_cast<const device Element*>(elements); }

  half2 group_of(int column, bool aligned) const thread {
    if (kKvFormat != kKvInt4) {
      return half2(0.0f);
    }
    const device Scale* group = groups + column / kInt4Group * 2;
    return aligned ? *reinterpret_cast<const device half2*>(group) : half2(group[0], group[1]);
  }
};

// K or V of one sequence and key-value head.
struct StoredOperand {
  const device Stored* elements;
  long first;  // offset of the first element from the base pointer, which is in a register anyway
  const device Scale* scales;  // base of all sequences and heads, to save a pointer
  uint batch;
  uint head;

  const device Scale* scales_at(KeyPlace place, constant Strides3& strides) const thread {
    return scales + (fc_paged ? uint(place.block) : batch) * strides.batch + head * strides.head +
           uint(place.slot) * strides.row;
  }
  // The scale of a row; 1 if `read` is false.
  float row_scale(KeyPlace place, constant Strides3& strides, bool read) const thread {
    return read ? float(*scales_at(place, strides)) : 1.0f;
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
