// Where the keys of a sequence live: in one strided tensor, or in the blocks of a paged pool (PagedAttention:
// Kwon et al. 2023).
#pragma once

#include "config.h"

// Whether the eight keys of a fragment always lie in one block.
constant bool fc_fragment_blocks = fc_block_size % 8 == 0;
// Whether the keys of a step always do.
constant bool fc_step_blocks = fc_block_size % FATTN_TILE_KEYS == 0;

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
  int length;  // keys of this sequence

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
    place.exists = key < length && block >= 0;
    return place;
  }
};

FATTN_CONSTEXPR uint kAllKeys = kTileKeys < 32 ? (1u << (kTileKeys % 32)) - 1 : ~0u;

// The blocks of one step, by key fragment; looked up once for K and V.
struct StepBlocks {
  int blocks[kKeyFragments];

  // Returns whether every key of the step exists.
  bool look_up(thread const KeyTable& table, int first_key, ushort lane) thread {
    bool exist = first_key + kTileKeys <= table.length;
    if (!fc_paged) {
      return exist;
    }
    if (!fc_fragment_blocks) {  // each lane looks up one key of 32
#pragma clang loop unroll(full)
      for (int key = 0; key < kTileKeys; key += kSimdWidth) {
        exist = exist && table.block_of(first_key + key + lane % kTileKeys) >= 0;
      }
      return simd_all(exist);
    }
#pragma clang loop unroll(full)
    for (int k = 0; k < kKeyFragments; k++) {
      const bool in_block_before = k > 0 && (fc_block_size % kTileKeys == 0 ||
                                             (kTileKeys % fc_block_size == 0 && k * 8 % fc_block_size != 0));
      blocks[k] = in_block_before ? blocks[max(k - 1, 0)] : table.block_of(first_key + k * 8);
      exist = exist && blocks[k] >= 0;
    }
    return exist;
  }

  // The place of a key in fragment k.
  KeyPlace find(thread const KeyTable& table, int key, int k) const thread {
    return table.place_of(key, fc_paged ? (fc_fragment_blocks ? blocks[k] : table.block_of(key)) : 0);
  }
};

// The keys of one step that a threadgroup stages: each lane of a simdgroup looks up one of them, and the
// others ask it. Blocks of whole steps need no asking: all lanes know the one block.
struct StagedKeys {
  int first_key;
  int block;   // of key first_key + lane, -1 if there is no such key; or of all keys
  uint exist;  // bit i: key first_key + i exists

  void look_up(thread const KeyTable& table, int key, ushort lane) thread {
    static_assert(kTileKeys <= kSimdWidth, "a lane looks up one key");
    first_key = key;
    const int own_key = key + lane % kTileKeys;
    block = table.block_of(fc_step_blocks ? key : own_key);
    exist = uint(simd_vote::vote_t(simd_ballot(table.place_of(own_key, block).exists))) & kAllKeys;
  }

  // In all lanes at once: key first_key + i, of which each lane may ask for another.
  KeyPlace find(thread const KeyTable& table, int i) const thread {
    return table.place_of(first_key + i, fc_step_blocks ? block : simd_shuffle(block, ushort(i)));
  }

  // The bits of the keys whose scores a lane holds, as hide_scores takes them.
  uint present(ushort pair) const thread {
    uint bits = 0;
#pragma clang loop unroll(full)
    for (int k = 0; k < kKeyFragments; k++) {
      bits |= ((exist >> (k * 8 + pair * 2)) & 3) << (2 * k);
    }
    return bits;
  }
};

inline const device Element* row_at(const device Element* operand, KeyPlace place,
                                    constant Strides3& strides) {
  return operand + place.block * strides.batch + place.slot * strides.row;
}

}  // namespace fattn
