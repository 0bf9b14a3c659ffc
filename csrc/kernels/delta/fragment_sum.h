// Sums an 8x8 matrix of which each lane has a summand.
#pragma once

#include "../common/fragment.h"
#include "../common/sizes.h"

namespace fattn {

// Element i is at z[i], row by row. Each step sends the half of the elements that the other lane keeps, so 62
// shuffles suffice; the masks are in the order that leaves each lane its two elements of a fragment.
inline float2 sum_to_fragment(thread float (&z)[64], ushort lane) {
  const ushort masks[5] = {16, 4, 2, 8, 1};
  int kept = 32;
  FATTN_UNROLL
  for (int step = 0; step < 5; step++) {
    const bool upper = (lane & masks[step]) != 0;
    FATTN_UNROLL
    for (int i = 0; i < 32; i++) {
      if (i < kept) {
        const float sent = upper ? z[i] : z[i + kept];
        z[i] = (upper ? z[i + kept] : z[i]) + simd_shuffle_xor(sent, masks[step]);
      }
    }
    kept /= 2;
  }
  return float2(z[0], z[1]);
}

}  // namespace fattn
