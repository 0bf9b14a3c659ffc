// From raw products to scores: scale, attn_mask, visibility. Everything in float32.
#pragma once

#include "softmax.h"

namespace fattn {

// What this lane's rows may see. Keys of a row are visible below a limit (its causal position, or the number
// of keys), where attn_mask does not forbid it.
struct Visibility {
  int limit[kRowFragments];  // row r sees keys j < limit[r]; 0 for rows that do not exist
  long mask_row[kRowFragments];
  long mask_key_stride;
};

// A score s in the log2 domain after attn_mask[index]. A finite additive value stays finite in the log2
// domain (a mask filled with the lowest float32 must still mean "equally unlikely", not "no key"); -inf hides
// the key.
inline float masked_score(float s, const device uchar* mask, long index) {
  float bias = 0.0f;
  if (fc_mask == kMaskBool) {
    return mask[index] != 0 ? s : -INFINITY;
  }
  if (fc_mask == kMaskFloat32) {
    bias = reinterpret_cast<const device float*>(mask)[index];
  } else if (fc_mask == kMaskFloat16) {
    bias = float(reinterpret_cast<const device half*>(mask)[index]);
  } else if (fc_mask == kMaskBFloat16) {
    bias = float(reinterpret_cast<const device bfloat*>(mask)[index]);
  }
  const float bias_log2 = bias * M_LOG2E_F;
  const bool overflowed = isinf(bias_log2) && !isinf(bias);
  return s + (overflowed ? copysign(FLT_MAX, bias) : bias_log2);
}

// Scales the products of one step.
inline void scale_scores(thread OnlineAttention& attention, float scale_log2) {
#pragma unroll
  for (int r = 0; r < kRowFragments; r++) {
#pragma unroll
    for (int k = 0; k < kKeyFragments; k++) {
      attention.score[r][k].thread_elements()[0] *= scale_log2;
      attention.score[r][k].thread_elements()[1] *= scale_log2;
    }
  }
}

// Hides what the rows must not see. `first_key` is the step's first key; bit 2k + e of `present` says that
// element e of this lane's fragment k belongs to a key that exists.
inline void hide_scores(thread OnlineAttention& attention, thread const Visibility& visible,
                        const device uchar* mask, int first_key, uint present, LanePosition at) {
#pragma unroll
  for (int r = 0; r < kRowFragments; r++) {
#pragma unroll
    for (int k = 0; k < kKeyFragments; k++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int key = first_key + k * 8 + at.pair * 2 + e;
        const bool seen = key < visible.limit[r] && ((present >> (2 * k + e)) & 1);
        float s = attention.score[r][k].thread_elements()[e];
        if (seen && fc_has_mask) {
          s = masked_score(s, mask, visible.mask_row[r] + key * visible.mask_key_stride);
        }
        attention.score[r][k].thread_elements()[e] = seen ? s : -INFINITY;
      }
    }
  }
}

}  // namespace fattn
