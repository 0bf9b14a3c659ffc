// Where results are that are counted as lse has them: of decode, and what merge makes of parts.
#pragma once

#include "constants.h"

namespace fattn {

// Results are counted by batch, head and row, as lse has them; `out` may have them by batch, row and head.
// `rows`: of a head. There are fewer than 2^32 in all.
inline uint out_row(uint result, uint rows, uint rows_per_sequence) {
  if (!fc_token_major_out) {
    return result;
  }
  const uint in_sequence = result % rows_per_sequence;
  const uint heads = rows_per_sequence / rows;
  return result - in_sequence + in_sequence % rows * heads + in_sequence / rows;
}

}  // namespace fattn
