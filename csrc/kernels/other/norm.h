// RMSNorm in the forms of transformers' modules, with their roundings.
#pragma once

#include "../common/activations.h"
#include "column_loads.h"

namespace fattn {

typedef FATTN_WEIGHT_T Weight;  // Element or float

FATTN_CONSTEXPR int kNorm = FATTN_NORM;

inline float rounded(float x) { return float(Element(x)); }

// The product with the weight is not rounded.
inline float normed(float x, float scale, float weight) {
  const float factor = kNorm == kNormPlusOne ? 1.0f + weight : weight;
  return (kNorm == kNormRounded ? rounded(x * scale) : x * scale) * factor;
}

}  // namespace fattn
