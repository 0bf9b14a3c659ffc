// Maps the index of a result to its row in `out`, for decode and merge.
#pragma once

#include "constants.h"

namespace fattn {

// `result` counts rows in the order of lse: batch, head, row. A token-major `out` is ordered by batch, row,
// head. `rows`: rows per head. There are fewer than 2^32 results.
inline uint out_row(uint result, uint rows, uint rows_per_sequence) {
  if (!fc_token_major_out) {
    return result;
  }
  const uint in_sequence = result % rows_per_sequence;
  const uint heads = rows_per_sequence / rows;
  return result - in_sequence + in_sequence % rows * heads + in_sequence / rows;
}

}  // namespace fattn
