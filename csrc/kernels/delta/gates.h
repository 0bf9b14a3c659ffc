// The gates of a token: its decay exp(g), and beta. Declare fc_raw_gates before including this file.
//
// Decays between tokens are products of exp(g), never exponentials of differences of sums: nothing overflows
// while g <= 0, and a decay of 0 needs no care.
#pragma once

#include "../common/activations.h"

namespace fattn {

typedef FATTN_A_LOG_T ALog;      // Element or float
typedef FATTN_DT_BIAS_T DtBias;  // likewise

// log(1 + exp(x)). The quotient undoes the rounding of 1 + exp, which would be an error of every slow decay.
inline float softplus(float x) {
  const float small = precise::exp(-fabs(x)), sum = 1.0f + small;
  return fmax(x, 0.0f) + (sum == 1.0f ? small : precise::log(sum) * (small / (sum - 1.0f)));
}

// `a_log` and `dt_bias`: of the head and of the channel, at `head` and `channel`; unused unless gates are
// raw.
inline float decay_of(float raw, const device ALog* a_log, const device DtBias* dt_bias, int head,
                      int channel) {
  const float g =
      fc_raw_gates ? -precise::exp(float(a_log[head])) * softplus(raw + float(dt_bias[channel])) : raw;
  return precise::exp(g);
}
inline float beta_of(float raw) { return fc_raw_gates ? sigmoid(raw) : raw; }

// 1 / length of a query or key, from the sum of its squares, as in transformers and fla.
inline float inverse_length(float squares) { return 1.0f / sqrt(squares + 1e-6f); }

}  // namespace fattn
