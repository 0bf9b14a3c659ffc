// The denominator of a row's softmax, over all its keys or a part of them.
#pragma once

#include "constants.h"

namespace fattn {

// sum = sum of exp(l_j - max) over logits l_j, with their largest, max.
struct RowSum {
  float score;  // max in score units
  float logit;  // max in natural units
  float sum;    // 0 if the row saw no key

  float log_sum_exp() const thread { return sum == 0.0f ? -INFINITY : logit + log(sum); }

  // The form that merge reads. A single log-sum-exp in float32 would round away the sum beside a logit of
  // 1e6. A weight is 2^(score * log2_per_score).
  float4 of_part(float log2_per_score) const thread { return float4(score, logit, sum, log2_per_score); }
};

inline RowSum row_sum_of_no_keys() {
  RowSum row;
  row.score = row.logit = -INFINITY;
  row.sum = 0.0f;
  return row;
}

}  // namespace fattn
