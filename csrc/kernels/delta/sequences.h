// Where the tokens of a sequence are. Sequences are rows of a batch, or packed one after another in the only
// row. Declare fc_packed before including this file.
#pragma once

#include <metal_stdlib>

#include "delta_params.h"

using namespace metal;

namespace fattn {

struct Sequence {
  int number;
  int batch;
  int first;  // token of the batch
  int length;
};

// `length`: of a batch.
inline Sequence sequence_at(int number, const device int* cu_seqlens, int length) {
  Sequence at = {number, number, 0, length};
  if (fc_packed) {
    at.batch = 0;
    at.first = clamp(cu_seqlens[number], 0, length);
    at.length = clamp(cu_seqlens[number + 1], at.first, length) - at.first;
  }
  return at;
}

// Sequences are cut into pieces of `size` tokens, each from its own start. The pieces of packed sequence n
// begin at piece start / size + n, so that no piece depends on the lengths of other sequences; some are
// unused.
inline int first_piece(Sequence of, int size, int length) {
  return fc_packed ? of.first / size + of.number : of.number * ((length + size - 1) / size);
}

// The sequence of a piece.
inline int sequence_of(int piece, int size, const device int* cu_seqlens, int sequences, int length) {
  if (!fc_packed) {
    return piece / ((length + size - 1) / size);
  }
  int from = 0, to = sequences;  // a binary search
  while (to - from > 1) {
    const int middle = (from + to) / 2;
    const bool begins = clamp(cu_seqlens[middle], 0, length) / size + middle <= piece;
    from = begins ? middle : from;
    to = begins ? to : middle;
  }
  return from;
}

// An operand from a token on: of a key head, or of a value head among those of a key head. 32 bits hold the
// offsets of the next tokens of a chunk.
template <typename T>
inline const device T* tokens_from(const device T* operand, constant TokenStrides& strides, Sequence of,
                                   int token, int key_head, int value_head) {
  return operand + of.batch * strides.batch + (of.first + token) * strides.token + key_head * strides.group +
         value_head * strides.head;
}
// The index of a token among all of the call.
inline long token_index(Sequence of, int token, int length) {
  return long(of.batch) * length + of.first + token;
}

}  // namespace fattn
