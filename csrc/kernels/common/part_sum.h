// The denominator of a row's softmax over some or all of its keys, and the merge of partial results over
// disjoint keys. Part p has values o_p and a sum l_p relative to its maximum m_p; with the maximum m of all
// m_p, out = sum exp(m_p - m) o_p / sum exp(m_p - m) l_p.
//
// The order is fixed: first the parts of each simdgroup of merge.metal, then the sums of the simdgroups.
// decode adds the chunks of a short cache in the same order (chunk_sum.h), so results are bit-identical.
#pragma once

#include "constants.h"

namespace fattn {

// sum = sum of exp(l_j - max) over logits l_j, with their largest, max.
struct RowSum {
  float score;  // max in score units
  float logit;  // max in natural units
  float sum;    // 0 if the row saw no key

  float log_sum_exp() const thread { return sum == 0.0f ? -INFINITY : logit + log(sum); }

  // The form that merge reads. A single float32 log-sum-exp would lose the sum next to a logit of 1e6. A
  // weight is 2^(score * log2_per_score).
  float4 of_part(float log2_per_score) const thread { return float4(score, logit, sum, log2_per_score); }
};

inline RowSum row_sum_of_no_keys() {
  RowSum row;
  row.score = row.logit = -INFINITY;
  row.sum = 0.0f;
  return row;
}

// Rescales weights relative to `from` to `to`. Exactly 1 if they are equal, so merging a single part returns
// it unchanged.
inline float shift_of(float from, float to, float log2_per_score) {
  const float origin = to == -INFINITY ? 0.0f : to;
  return from == to ? 1.0f : fast::exp2((from - origin) * log2_per_score);
}

// Factors for adding the parts of all lanes to a sum.
struct LaneParts {
  float weight;  // of this lane's part
  float shrink;  // of the previous sum
};

// Adds the parts of a row, one per lane, to `keys`; the logit only if `with_logit` is set.
inline LaneParts add_lanes(thread RowSum& keys, RowSum own, bool with_logit, float log2_per_score) {
  const float largest = fmax(keys.score, simd_max(own.score));
  LaneParts parts;
  parts.weight = shift_of(own.score, largest, log2_per_score);
  parts.shrink = shift_of(keys.score, largest, log2_per_score);
  keys.score = largest;
  if (with_logit) {
    keys.logit = fmax(keys.logit, simd_max(own.logit));
  }
  keys.sum = keys.sum * parts.shrink + simd_sum(own.sum * parts.weight);
  return parts;
}

// Weighted values of a part. The values of a part without keys are arbitrary, even NaN.
template <typename T>
inline T weighted_values(bool counts, float weight, T values) {
  return counts ? weight * values : T(0.0f);
}

// The second sum: first raise `keys` to the maximum of every sum, then add each by its weight.
inline void raise_to(thread RowSum& keys, RowSum sum) {
  keys.score = fmax(keys.score, sum.score);
  keys.logit = fmax(keys.logit, sum.logit);
}
inline float add_sum(thread RowSum& keys, RowSum sum, float log2_per_score) {
  const float weight = shift_of(sum.score, keys.score, log2_per_score);
  keys.sum += weight * sum.sum;
  return weight;
}

}  // namespace fattn
