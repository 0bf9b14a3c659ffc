// Where the keys of a sequence live: in one strided tensor, or in the blocks of a paged pool (PagedAttention:
// Kwon et al. 2023).
#pragma once

#include "config.h"

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

  // The block size is a function constant, so the division is a multiplication, and a shift for the usual
  // sizes. A table entry outside the pool holds no key: nothing is read through it.
  KeyPlace find(int key) const thread {
    KeyPlace place;
    place.exists = key < length;
    place.block = 0;
    place.slot = key;
    if (fc_paged && place.exists) {
      const int logical = int(uint(key) / fc_block_size);
      place.block = blocks[logical * entry_stride];
      place.slot = int(uint(key) - uint(logical) * fc_block_size);
      place.exists = place.block >= 0 && place.block < num_blocks;
    }
    return place;
  }
};

inline const device Element* row_at(const device Element* operand, KeyPlace place,
                                    constant Strides3& strides) {
  return operand + place.block * strides.batch + place.slot * strides.row;
}

}  // namespace fattn
