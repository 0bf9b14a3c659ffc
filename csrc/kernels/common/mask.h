// How attn_mask is read.
#pragma once

#include "constants.h"

namespace fattn {

// What attn_mask[index] adds to a score; -inf hides the key.
inline float mask_value(const device uchar* mask, long index) {
  if (fc_mask == kMaskFloat32) {
    return reinterpret_cast<const device float*>(mask)[index];
  }
  if (fc_mask == kMaskFloat16) {
    return float(reinterpret_cast<const device half*>(mask)[index]);
  }
  if (fc_mask == kMaskBFloat16) {
    return float(reinterpret_cast<const device bfloat*>(mask)[index]);
  }
  return mask[index] != 0 ? 0.0f : -INFINITY;
}

}  // namespace fattn
