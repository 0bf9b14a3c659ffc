// Products of the backward kernels in blocks of simdgroup matrices: S and dP of score_gradient.h.
#pragma once

#include "head_share.h"
#include "score_gradient.h"

namespace fattn {

// Blocks of eight owned and eight staged rows: the products of Q and K, and of dO and V.
template <int kCount>
struct ProductBlocks {
  simdgroup_float8x8 products[kCount];
  simdgroup_float8x8 weight_grads[kCount];

  ProductBlocks() thread {}

  // `key_like` and `value_like`: staged rows of K and V, or of Q and dO.
  void multiply(thread const OwnedRows<kHeadDim, kCount>& query_like,
                thread const OwnedRows<kValueDim, kCount>& grad_like, const threadgroup TileElement* key_like,
                int key_pitch, const threadgroup TileElement* value_like, int value_pitch, LanePosition at)
      thread {
    FATTN_UNROLL
    for (int r = 0; r < kCount; r++) {
      set_elements(products[r], 0.0f, 0.0f);
      set_elements(weight_grads[r], 0.0f, 0.0f);
    }
    constexpr int kMax = KeyShare::kChunks < ValueShare::kChunks ? ValueShare::kChunks : KeyShare::kChunks;
    FATTN_UNROLL
    for (int c = 0; c < kMax; c++) {
      if (c < KeyShare::kChunks) {
        query_like.multiply(key_like, key_pitch, min(c, KeyShare::kChunks - 1), at, products);
      }
      if (c < ValueShare::kChunks) {
        grad_like.multiply(value_like, value_pitch, min(c, ValueShare::kChunks - 1), at, weight_grads);
      }
    }
  }
};

// Blocks of all shares in threadgroup memory, where each simdgroup adds the other simdgroups' sums to its
// own. kWalked: blocks of a group in a step.
template <int kCount, int kWalked>
struct SharedBlocks {
  static constant constexpr int kBlock = block_pairs(kCount);
  static constant constexpr int kPairs = shared_block_pairs(kColumnShares, kRowGroups, kWalked, kCount);

  threadgroup float2* pairs;  // [group][walked][share][owned][product, gradient][lane]
  ushort group;
  ushort share;

  void write(int n, thread const ProductBlocks<kCount>& blocks, LanePosition at) const thread {
    threadgroup float2* to = pairs + pair_index(n, share, at);
    FATTN_UNROLL
    for (int r = 0; r < kCount; r++) {
      to[2 * r * kSimdWidth] =
          float2(blocks.products[r].thread_elements()[0], blocks.products[r].thread_elements()[1]);
      to[(2 * r + 1) * kSimdWidth] =
          float2(blocks.weight_grads[r].thread_elements()[0], blocks.weight_grads[r].thread_elements()[1]);
    }
  }

  void read(int n, thread ProductBlocks<kCount>& blocks, LanePosition at) const thread {
    FATTN_UNROLL
    for (int r = 0; r < kCount; r++) {
      float2 product = float2(0.0f);
      float2 weight_grad = float2(0.0f);
      FATTN_UNROLL
      for (int s = 0; s < kColumnShares; s++) {
        const threadgroup float2* from = pairs + pair_index(n, s, at);
        product += from[2 * r * kSimdWidth];
        weight_grad += from[(2 * r + 1) * kSimdWidth];
      }
      set_elements(blocks.products[r], product[0], product[1]);
      set_elements(blocks.weight_grads[r], weight_grad[0], weight_grad[1]);
    }
  }

 private:
  int pair_index(int n, int of_share, LanePosition at) const thread {
    return ((group * kWalked + n) * kColumnShares + of_share) * kBlock + at.lane;
  }
};

}  // namespace fattn
