// The arithmetic of attention in plain PyTorch, for calls whose sequences all have as many query rows.
#pragma once

#include <tuple>

#include "../describe/calls.h"

namespace fattn {

// A call whose query is [batch, q_heads, q_len, head_dim], and where its rows are.
struct Rows {
  const Call& call;
  at::Tensor first_position;  // of query row 0: [batch or 1, 1]
};

// Where the keys of each sequence begin among the packed ones of all, [batch, 1], and how many each has, cut
// to the capacity.
at::Tensor first_packed_keys(const Call& call);
at::Tensor key_counts(const Call& call);

// (out, lse) of rows that see no key: 0, and the logit of the sink. In memory of their own: `attend` writes
// them.
std::tuple<at::Tensor, at::Tensor> no_key_results(const Call& call);

// Writes out [batch, q_heads, q_len, value_dim] and lse [batch, q_heads, q_len], which hold the results of
// rows that see no key.
void attend(const Rows& query, const at::Tensor& out, const at::Tensor& lse);

}  // namespace fattn
