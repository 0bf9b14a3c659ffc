// Row scales of an int8 or fp8_e4m3 cache. They apply to products and weights instead of elements:
// q (s k) = s (q k).
#pragma once

#include "softmax.h"

namespace fattn {

// The scales of a step in threadgroup memory. One lane loads each scale; the eight lanes with scores of its
// key read it.
struct SharedScales {
  threadgroup float2* pairs;  // pairs of neighbouring keys; first the keys' scales, then the values'

  void put_key(int key, float scale) const thread {
    reinterpret_cast<threadgroup float*>(pairs)[key] = scale;
  }
  void put_value(int key, float scale) const thread {
    reinterpret_cast<threadgroup float*>(pairs)[kTileKeys + key] = scale;
  }

  float of_key(int key) const thread { return reinterpret_cast<const threadgroup float*>(pairs)[key]; }
  float2 of_keys(int k, LanePosition at) const thread { return pairs[k * 4 + at.pair]; }
  float2 of_values(int k, LanePosition at) const thread { return pairs[kTileKeys / 2 + k * 4 + at.pair]; }
};

// Multiplies the products of a step by the scales of its keys.
template <typename Attention>
inline void scale_products(thread Attention& attention, thread const SharedScales& scales, LanePosition at) {
  if (!kRowScales || !fc_scales) {
    return;
  }
  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k++) {
    const float2 pair = scales.of_keys(k, at);
    attention.scale_products(k, pair[0], pair[1]);
  }
}

// Multiplies the weights of key fragment k by the scales of its values, or by 0 for keys hidden from this
// lane's rows.
template <typename Attention>
inline void scale_weights(thread Attention& attention, thread const SharedScales& scales, int k,
                          SeenKeys seen, LanePosition at) {
  if (kRowScales && fc_scales) {
    const float2 pair = scales.of_values(k, at);
    attention.scale_weights(k, pair[0], pair[1], seen);
  }
}

}  // namespace fattn
