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

// The address of attn_mask[index].
inline const device uchar* mask_at(const device uchar* mask, long index) {
  return mask + index * (!fc_additive_mask ? 1 : fc_mask == kMaskFloat32 ? 4 : 2);
}

// The term that attn_mask[index] adds to a score; -inf hides the key.
inline float mask_value(const device uchar* mask, long index) {
  if (fc_additive_mask) {
    return float_at(mask, index, fc_mask - kMaskFloat32);
  }
  return mask[index] != 0 ? 0.0f : -INFINITY;
}

// Whether a term of attn_mask hides the key. Its score is then selected, not added to: it may be NaN.
inline bool hides_key(float term) { return term == -INFINITY; }

}  // namespace fattn
