// Score units: scores contain a factor log2(e), so a weight is one exp2 of a difference. With an additive
// attn_mask they are natural: the factor would lose precision under a mask of -1e5, and overflow the lowest
// float32, which some programs add to every key of a row to mean "uniform".
#pragma once

#include "constants.h"

namespace fattn {

inline float weight_of(float score_difference) {
  return fast::exp2(fc_additive_mask ? score_difference * M_LOG2E_F : score_difference);
}

// A weight is 2^(score * log2_per_score()).
inline float log2_per_score() { return fc_additive_mask ? M_LOG2E_F : 1.0f; }

// Keeps a finite number finite in score units: above 2.3e38 it becomes the largest float.
inline float finite_score(float natural, float score) {
  return isinf(score) && isfinite(natural) ? copysign(FLT_MAX, natural) : score;
}

// A learned sink logit in score units.
inline float sink_score(float sink) { return fc_additive_mask ? sink : finite_score(sink, sink * M_LOG2E_F); }

}  // namespace fattn
