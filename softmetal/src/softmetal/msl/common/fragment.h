// Which elements of an 8x8 matrix a lane holds.
#pragma once

namespace softmetal {
// The position of a lane's two elements, (row, column) and (row, column + 1).
struct Fragment {
  uint row, column;
};
// As on Apple's GPUs up to Metal 3.
SOFTMETAL_INLINE Fragment fragment_of(uint lane) {
  const uint quad = lane / 4;
  return {(quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2};
}
}  // namespace softmetal
