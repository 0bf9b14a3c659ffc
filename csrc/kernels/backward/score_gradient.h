// From products to weights and their gradients. With scores S = scale Q K^T (softcap, ALiBi, attn_mask), the
// log-sum-exp lse of a row, and the gradients dO and dlse of the results:
//
//   P = exp(S - lse), dP = dO V^T, delta = rowsum(P * dP) - dlse, dS = P * (dP - delta)
//   dV = P^T dO, dQ = scale (dS * c) K, dK = scale (dS * c)^T Q        c: the derivative of the softcap
//
// lse is rounded to one float. This would dominate the error of float32 gradients, and of all dtypes under an
// additive mask of -1e5. So backward_query divides the weights by their own sum: an error of their origin,
// lse or the row's maximum score, then cancels.
#pragma once

#include "row_state.h"
#include "../common/scores.h"

namespace fattn {

// The natural log-sum-exp of a row in score units.
inline float lse_in_units(float natural) {
  return fc_additive_mask ? natural : finite_score(natural, natural * M_LOG2E_F);
}

// The score of a key in a row; -inf if the row does not see it.
struct KeyScore {
  float capped;  // before ALiBi and attn_mask
  float score;

  bool seen() const thread { return score != -INFINITY; }
};

// The score if the row sees the key; hide_unseen() follows where it may not.
inline KeyScore seen_score(float product, thread const ScoreModifiers& modifiers, int r, int key) {
  KeyScore found;
  found.capped = capped_score(product, modifiers);
  found.score = biased_score(found.capped, modifiers, r, key);
  return found;
}
inline void hide_unseen(thread KeyScore& found, thread const Visibility& visible, const device uchar* mask,
                        int r, int key) {
  if (!sees_key(found.score, visible, mask, r, key, true)) {
    found.score = -INFINITY;
  }
}

// Without `edge`, the row sees the key.
inline KeyScore key_score(float product, thread const ScoreModifiers& modifiers,
                          thread const Visibility& visible, const device uchar* mask, int r, int key,
                          bool edge) {
  KeyScore found = seen_score(product, modifiers, r, key);
  if (edge) {
    hide_unseen(found, visible, mask, r, key);
  }
  return found;
}

struct ScoreGradient {
  float weight;
  float score;    // the gradient of the score
  float product;  // the gradient of the scaled product
};

// `weight_grad`: the gradient of the weight. A select drops hidden keys, whose values may be NaN.
inline ScoreGradient score_gradient(KeyScore key, float weight_grad, float lse, float delta,
                                    thread const ScoreModifiers& modifiers) {
  ScoreGradient gradient;
  gradient.weight = key.seen() ? weight_of(key.score - lse) : 0.0f;
  gradient.score = key.seen() ? gradient.weight * (weight_grad - delta) : 0.0f;
  gradient.product = gradient.score;
  if (fc_softcap) {
    const float slope = softcap_slope(key.capped, modifiers.softcap);
    gradient.product = key.seen() ? gradient.score * slope : 0.0f;
  }
  return gradient;
}

}  // namespace fattn
