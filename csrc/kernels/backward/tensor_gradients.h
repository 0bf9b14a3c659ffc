// The products of the backward on Metal 4's tensor operations. A simdgroup owns 16 rows of one operand and
// sums one gradient:
//
//   of the    owns            scores   weight_grads   adds
//   query     query, dO       Q K^T    dO V^T         dS K
//   key       key, value      K Q^T    V dO^T         dS^T Q
//   value     key             K Q^T                   P^T dO
//
// Scores and weight_grads have the same descriptor and types, so element i is in the same row and column of
// both.
#pragma once

#include "score_gradient.h"
#include "../common/results.h"
#include "../prefill/tensor_products.h"

namespace fattn {

// Threadgroup memory for a block of gradients that a product cannot take from registers.
struct LeftBlock {
#if !FATTN_REGISTERS
  threadgroup float* shared;  // of this simdgroup
#endif
};

// Adds the product of the gradients in `scores` and the rows of a step.
template <class Product, class Scores, class Right, class Output>
inline void accumulate(thread Product& product, thread Scores& scores, thread Right& right,
                       thread Output& output, LeftBlock block) {
#if FATTN_REGISTERS
  auto left = product.template get_left_input_cooperative_tensor<float, Element, float>(scores);
#else
  simdgroup_barrier(mem_flags::mem_threadgroup);  // the previous block has been read
  FATTN_EACH_ELEMENT(i, scores) {
    const auto at = scores.get_multidimensional_index(i);
    block.shared[at[1] * kScorePitch + at[0]] = scores[i];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  SharedWeights left(block.shared, dextents<int, 2>(kWalked, kTensorRows), array<int, 2>{1, kScorePitch});
#endif
  product.run(left, right, output);
}

// The sum of row `lane` of a block.
template <class Scores>
inline float row_sum_of(thread Scores& scores, ushort lane) {
  float own = 0.0f;
#pragma clang loop unroll(disable)
  for (ushort row = 0; row < kTensorRows; row++) {
    float sum = 0.0f;
    FATTN_EACH_ELEMENT(i, scores) {
      sum += scores.get_multidimensional_index(i)[1] == row ? float(scores[i]) : 0.0f;
    }
    sum = simd_sum(sum);
    own = lane == row ? sum : own;
  }
  return own;
}

}  // namespace fattn

// Declares the LeftBlock of a simdgroup.
#if FATTN_REGISTERS
#define FATTN_LEFT_BLOCK(block) LeftBlock block;
#else
#define FATTN_LEFT_BLOCK(block)                                             \
  threadgroup float shared_blocks[kSimdgroups * kTensorRows * kScorePitch]; \
  LeftBlock block;                                                          \
  block.shared = shared_blocks + simdgroup_index * (kTensorRows * kScorePitch);
#endif
