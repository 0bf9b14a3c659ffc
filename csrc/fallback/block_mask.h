// The calls that a block mask divides a call into: the rows of a block see the same keys.
#pragma once

#include <functional>

#include "attention.h"

namespace fattn {

// Query rows [row, row + rows) of query heads [head, head + heads), and the keys of their visible blocks.
struct BlockRows {
  Call call;                 // of these rows, heads and keys
  at::Tensor key_positions;  // int64 [keys]
  int64_t head, heads, kv_head, kv_heads, row, rows;

  // The part of a tensor [batch, query heads, rows, ..].
  at::Tensor rows_of(const at::Tensor& tensor) const {
    return tensor.narrow(1, head, heads).narrow(2, row, rows);
  }
  // Adds to these keys in a tensor [batch, key-value heads, keys, ..].
  void add_keys(const at::Tensor& to, const at::Tensor& own) const {
    to.narrow(1, kv_head, kv_heads).index_add_(2, key_positions, own);
  }
};

// Visits the rows of blocks of a call of one sequence. All heads are visited together if they share a mask.
void visit_block_rows(const Call& call, const std::function<void(const BlockRows&)>& visit);

}  // namespace fattn
