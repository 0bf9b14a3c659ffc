// What the weights of a row add up to: of all its keys, or of a part of them.
#pragma once

#include "constants.h"

namespace fattn {

// Relative to the row's largest logit.
struct RowSum {
  float score;  // that logit in score units
  float logit;  // and natural
  float sum;    // 0 if the row saw no key

  float log_sum_exp() const thread { return sum == 0.0f ? -INFINITY : logit + log(sum); }

  // What merge reads. Not the log-sum-exp: logits of 1e6 leave no room for the sum in one float.
  // `log2_per_score`: log2 of the weight that a score unit makes.
  float4 of_part(float log2_per_score) const thread { return float4(score, logit, sum, log2_per_score); }
};

inline RowSum row_sum_of_no_keys() {
  RowSum row;
  row.score = row.logit = -INFINITY;
  row.sum = 0.0f;
  return row;
}

}  // namespace fattn
