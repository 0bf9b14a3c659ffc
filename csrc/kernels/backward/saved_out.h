// The forward's result in a backward: float32, or 16 bits and what rounding took off (remainder_of). Without
// the remainder, in a row with one dominant key, the rounding error would exceed the gradient.
#pragma once

#include "../prefill/prefill_tile.h"

namespace fattn {

struct SavedRow {
  const device float* floats;     // without a remainder
  const device Element* rounded;  // with one
  const device Element* remainder;

  float result(int column) const thread {
    if (fc_out_remainder) {
      return float(rounded[column]) + float(remainder[column]) / kRemainderScale;
    }
    return floats[column];
  }

  // A part of the product with a row of dO: of the columns first, first + step, and so on.
  float product(const device Element* grad, int first, int step) const thread {
    float sum = 0.0f;
    for (int column = first; column < kValueDim; column += step) {
      sum = fma(result(column), float(grad[column]), sum);
    }
    return sum;
  }
};

inline SavedRow saved_row(thread const PrefillTile& tile, QueryRow row, constant BackwardParams& params,
                          const device uchar* saved_out) {
  const long place = tile.rows.row_offset(row, params.saved_out);
  SavedRow found;
  if (fc_out_remainder) {
    found.rounded = reinterpret_cast<const device Element*>(saved_out) + place;
    found.remainder = tile.operands.out_remainder + tile.rows.row_offset(row, params.out_remainder);
  } else {
    found.floats = reinterpret_cast<const device float*>(saved_out) + place;
  }
  return found;
}

}  // namespace fattn
