// Sums of numbers that all lanes have, each left in some lanes only.
#pragma once

#include <metal_stdlib>

#include "sizes.h"

using namespace metal;

namespace fattn {

// Lanes whose numbers differ in the bit `mask` add up the first 2 * kept numbers, and each keeps the sums of
// one half: a shuffle for each sum that is kept.
template <int N>
inline void scatter_sum(thread float (&numbers)[N], int kept, ushort mask, ushort lane) {
  const bool upper = (lane & mask) != 0;
  FATTN_UNROLL
  for (int i = 0; i < N / 2; i++) {  // the same length in all stages, so that the loop unrolls
    if (i < kept) {
      const float low = numbers[i], high = numbers[i + kept];
      numbers[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, mask);
    }
  }
}

}  // namespace fattn
