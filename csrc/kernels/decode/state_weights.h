// Merges the states of decode simdgroups that share a row, with different keys.
#pragma once

#include "../common/softmax.h"

namespace fattn {

// The weights of the states of one row in N simdgroups.
template <int N>
struct StateWeights {
  float weights[N];
  float largest;
  float sum;

  // Maximum and sum of each state are `stride` floats apart.
  void set(const threadgroup float* row_max, const threadgroup float* row_sum, int stride) thread {
    largest = -INFINITY;
#pragma clang loop unroll(full)
    for (int g = 0; g < N; g++) {
      largest = fmax(largest, row_max[g * stride]);
    }
    const float origin = largest == -INFINITY ? 0.0f : largest;
    sum = 0.0f;
#pragma clang loop unroll(full)
    for (int g = 0; g < N; g++) {
      weights[g] = weight_of(row_max[g * stride] - origin);
      sum += weights[g] * row_sum[g * stride];
    }
  }
};

}  // namespace fattn
