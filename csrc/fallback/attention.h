// The arithmetic of attention in plain PyTorch, for calls whose sequences have equally many query rows.
#pragma once

#include <tuple>

#include "../describe/calls.h"

namespace fattn {

// A call whose query is [batch, q_heads, q_len, head_dim], and the positions of its rows.
struct Rows {
  const Call& call;
  at::Tensor first_position;      // of query row 0: [batch or 1, 1]
  at::Tensor count = {};          // rows per sequence, without padding: [batch, 1]. Undefined: q_len
  at::Tensor key_positions = {};  // int64 [kv_len]. Undefined: 0, 1, ..
};

// First packed key of each sequence, and its number of keys, clamped to the capacity: [batch, 1].
at::Tensor first_packed_keys(const Call& call);
at::Tensor key_counts(const Call& call);

// Keys and values of a call as [batch, kv_heads, kv_len, dim].
struct Keys {
  at::Tensor key;
  at::Tensor value;
  at::Tensor key_scales;
  at::Tensor value_scales;
  at::Tensor exists;  // bool [batch, kv_len]
};

// The decoded keys and values: values in float32, keys in the dtype of the score products.
Keys keys_of(const Call& call);

// The logits of some rows of a call, [batch, q_heads, rows, kv_len].
struct Logits {
  at::Tensor products;   // of query and key
  at::Tensor distances;  // the key's position less the row's: [batch or 1, 1, rows, kv_len]
  at::Tensor scores;     // in natural units, -inf where a key is hidden
  at::Tensor visible;
};
Logits logits_of(const Rows& query, const Keys& keys, int64_t first, int64_t rows);

// The logits of the sinks, or -inf without sinks: [1, q_heads or 1, 1, 1].
at::Tensor sink_logits(const Call& call);

// Query heads that share a key-value head become more rows of that head: [B, Hq, R, X] -> [B, Hkv, G * R, X].
at::Tensor fold_heads(const at::Tensor& rows, int64_t kv_heads);

// (out, lse) of rows without visible keys: 0, and the logit of the sink. Newly allocated, because attend()
// overwrites them.
std::tuple<at::Tensor, at::Tensor> no_key_results(const Call& call);

// Writes out [batch, q_heads, q_len, value_dim] and lse [batch, q_heads, q_len], which must be initialised by
// no_key_results().
void attend(const Rows& query, const at::Tensor& out, const at::Tensor& lse);

}  // namespace fattn
