// The rows of `out`, and what rounding takes off its elements.
#pragma once

#include "constants.h"

namespace fattn {

// What rounding to 16 bits takes off a result, in the same 16 bits.
template <typename T>
inline T remainder_of(float result) {
  return T((result - float(T(result))) * kRemainderScale);
}

// The row in `out` of a result of decode or merge. `result` counts rows in the order of lse: batch, head,
// row. A token-major `out` is ordered by batch, row, head. `rows`: rows per head. There are fewer than 2^32
// results.
inline uint out_row(uint result, uint rows, uint rows_per_sequence) {
  if (!fc_token_major_out) {
    return result;
  }
  const uint in_sequence = result % rows_per_sequence;
  const uint heads = rows_per_sequence / rows;
  return result - in_sequence + in_sequence % rows * heads + in_sequence / rows;
}

}  // namespace fattn
