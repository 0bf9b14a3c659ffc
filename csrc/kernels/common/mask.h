// Reads attn_mask and other tensors of any float dtype.
#pragma once

#include "constants.h"

namespace fattn {

// numbers[index]; `kind` is the tensor's FloatKind.
inline float float_at(const device uchar* numbers, long index, uint kind) {
  if (kind == kKindFloat16) {
    return float(reinterpret_cast<const device half*>(numbers)[index]);
  }
  if (kind == kKindBFloat16) {
    return float(reinterpret_cast<const device bfloat*>(numbers)[index]);
  }
  return reinterpret_cast<const device float*>(numbers)[index];
}

// attn_mask[index] as an additive term; -inf hides the key.
inline float mask_value(const device uchar* mask, long index) {
  if (fc_additive_mask) {
    return float_at(mask, index, fc_mask - kMaskFloat32);
  }
  return mask[index] != 0 ? 0.0f : -INFINITY;
}

// The additive terms of pair `index`.
inline float2 mask_pair(const device uchar* mask, uint index) {
  if (fc_mask == kMaskFloat32) {
    return reinterpret_cast<const device float2*>(mask)[index];
  }
  if (fc_mask == kMaskFloat16) {
    return float2(reinterpret_cast<const device half2*>(mask)[index]);
  }
  if (fc_mask == kMaskBFloat16) {
    return float2(reinterpret_cast<const device vec<bfloat, 2>*>(mask)[index]);
  }
  const uint both = reinterpret_cast<const device ushort*>(mask)[index];
  return float2(both % 256 != 0 ? 0.0f : -INFINITY, both / 256 != 0 ? 0.0f : -INFINITY);
}

// Whether a term of attn_mask hides the key. Replace the score of a hidden key: it may be NaN.
inline bool hides_key(float term) { return term == -INFINITY; }

}  // namespace fattn
