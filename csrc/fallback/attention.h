// The arithmetic of attention in plain PyTorch, for calls whose sequences have equally many query rows.
#pragma once

#include <tuple>

#include "../describe/calls.h"

namespace fattn {

// A call whose query is [batch, q_heads, q_len, head_dim], and the positions of its rows.
struct Rows {
  const Call& call;
  at::Tensor first_position;  // of query row 0: [batch or 1, 1]
  at::Tensor count = {};      // rows of each sequence; the others are padding: [batch, 1]. Undefined: q_len
};

// First packed key of each sequence, and its number of keys, clamped to the capacity: [batch, 1].
at::Tensor first_packed_keys(const Call& call);
at::Tensor key_counts(const Call& call);

// (out, lse) of rows that see no key: 0, and the logit of the sink. Newly allocated, because attend()
// overwrites them.
std::tuple<at::Tensor, at::Tensor> no_key_results(const Call& call);

// Writes out [batch, q_heads, q_len, value_dim] and lse [batch, q_heads, q_len], which hold the results of
// rows that see no key.
void attend(const Rows& query, const at::Tensor& out, const at::Tensor& lse);

}  // namespace fattn
