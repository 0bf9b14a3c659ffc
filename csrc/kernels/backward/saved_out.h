// The forward's result in a backward: float32, or 16 bits and what rounding took off (remainder_of). Without
// the remainder, in a row with one dominant key, the rounding error would exceed the gradient.
#pragma once

#include "../prefill/prefill_tile.h"

namespace fattn {

// The dot product of a row of the result and of dO, over the columns first, first + step, and so on.
inline float saved_product(QueryRow row, int first, int step, thread const PrefillTile& tile,
                           constant BackwardParams& params, const device Element* grad_out,
                           const device uchar* saved_out) {
  const device Element* grad = grad_out + tile.rows.row_offset(row, params.grad_out);
  const long place = tile.rows.row_offset(row, params.saved_out);
  const long place_of_remainder = tile.rows.row_offset(row, params.out_remainder);
  float sum = 0.0f;
  for (int column = first; column < kValueDim; column += step) {
    float result;
    if (fc_out_remainder) {
      const float remainder = float(tile.operands.out_remainder[place_of_remainder + column]);
      result = float(reinterpret_cast<const device Element*>(saved_out)[place + column]);
      result += remainder / kRemainderScale;
    } else {
      result = reinterpret_cast<const device float*>(saved_out)[place + column];
    }
    sum = fma(result, float(grad[column]), sum);
  }
  return sum;
}

}  // namespace fattn
