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

// Scales the products of one step.
inline void scale_scores(thread OnlineAttention& attention, float score_scale) {
#pragma clang loop unroll(full)
  for (int r = 0; r < kRowFragments; r++) {
#pragma clang loop unroll(full)
    for (int k = 0; k < kKeyFragments; k++) {
      attention.score[r][k].thread_elements()[0] *= score_scale;
      attention.score[r][k].thread_elements()[1] *= score_scale;
    }
  }
}

// Hides what the rows must not see. `first_key` is the step's first key; bit 2k + e of `present` says that
// element e of this lane's fragment k belongs to a key that exists.
inline void hide_scores(thread OnlineAttention& attention, thread const Visibility& visible,
                        const device uchar* mask, int first_key, uint present, LanePosition at) {
#pragma clang loop unroll(full)
  for (int r = 0; r < kRowFragments; r++) {
    attention.seen[r] = 0;
#pragma clang loop unroll(full)
    for (int k = 0; k < kKeyFragments; k++) {
#pragma clang loop unroll(full)
      for (int e = 0; e < 2; e++) {
        const int key = first_key + k * 8 + at.pair * 2 + e;
        bool seen = key < visible.limit[r] && ((present >> (2 * k + e)) & 1);
        float s = attention.score[r][k].thread_elements()[e];
        if (seen && fc_has_mask) {
          const float added = mask_value(mask, visible.mask_row[r] + key * visible.mask_key_stride);
          // Selected, not added: the score of a hidden key may be NaN.
          seen = added != -INFINITY;
          s = fc_additive_mask ? s + added : s;
        }
        attention.score[r][k].thread_elements()[e] = seen ? s : -INFINITY;
        attention.seen[r] |= uint(seen) << (2 * k + e);
      }
    }
  }
}

}  // namespace fattn
