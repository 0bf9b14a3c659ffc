// The gradients of attention in plain PyTorch, with whole score matrices, a slice of query rows at a time.
//
// With weights P of a row, the gradients dO of its result and dlse of its lse, and delta = sum(P * dP):
//   dP = dO V^T    dS = P (dP - delta + dlse)    dV += P^T dO    dQ = dT K    dK += dT^T Q
// where dS is the gradient of the score and dT the gradient of the product of query and key.
#include <algorithm>
#include <limits>

#include <ATen/ops/arange.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "../describe/tensor_checks.h"
#include "attention.h"
#include "block_mask.h"
#include "fallback.h"
#include "sequences.h"

namespace fattn {
namespace {

using at::Tensor;

constexpr int64_t kMaxScores = int64_t{1}
                               << 22;  // per slice of query rows; there are about ten such matrices

// The incoming gradients of some rows' results, and the results. Heads first, in float32.
struct Received {
  Tensor grad_out;
  Tensor grad_lse;  // undefined: none
  Tensor lse;
  Tensor out;  // undefined: not needed

  template <typename Function>
  Received map(Function function) const {
    const auto apply = [&](const Tensor& tensor) { return tensor.defined() ? function(tensor) : tensor; };
    return {apply(grad_out), apply(grad_lse), apply(lse), apply(out)};
  }
};

// Gradients in float32, with the shapes of the call's tensors.
struct Sums {
  Tensor query;
  Tensor key;
  Tensor value;
  Tensor sinks;         // [q_heads]
  Tensor alibi_slopes;  // [batch or 1, q_heads]
};

// Replaces unseen rows by 0: masked memory, even NaN, must not affect the gradients.
Tensor seen_or_zero(const Tensor& rows, const Tensor& seen) {
  return at::where(seen.unsqueeze(-1), rows.to(at::kFloat), 0.0);
}

// The weights of rows and of their sinks. lse is rounded, so it only serves as the origin of the
// exponentials; the last step divides by their actual sum.
struct Weights {
  Tensor of_keys;   // [batch, q_heads, rows, kv_len]
  Tensor of_sinks;  // [batch, q_heads, rows, 1]
};

Weights weights_of(const Call& call, const Logits& logits, const Tensor& lse) {
  const Tensor origin = lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1);  // of rows without keys
  const auto of_visible = [&](const Tensor& weights) { return at::where(logits.visible, weights, 0.0); };
  const Tensor of_keys = of_visible(at::exp(logits.scores.sub(origin).to(at::kFloat)));
  const Tensor of_sinks = at::exp(sink_logits(call).sub(origin));
  Tensor sum = of_keys.sum(-1, /*keepdim=*/true).add(of_sinks);
  sum = sum.masked_fill(sum.eq(0.0), 1.0);
  return {of_visible(of_keys.div(sum)), of_sinks.div(sum)};  // lse of a padding row may be NaN
}

// Adds the gradients of the rows [first, first + rows).
void add_rows(const Rows& all, const Keys& keys, const Received& all_received, int64_t first, int64_t rows,
              const Sums& sums) {
  const Call& call = all.call;
  const Problem& problem = call.problem;
  const ScoreOptions& options = problem.options;
  const Received received = all_received.map([&](const Tensor& of) { return of.narrow(2, first, rows); });
  const auto fold = [&](const Tensor& tensor) { return fold_heads(tensor, problem.kv_heads); };

  const Logits logits = logits_of(all, keys, first, rows);
  const auto [weights, sink_weights] = weights_of(call, logits, received.lse);
  const Tensor sees = logits.visible.any(-1);
  const Tensor seen = fold(logits.visible).any(-2);
  const Tensor query = fold(seen_or_zero(call.query.narrow(2, first, rows), sees));
  const Tensor grad_out = seen_or_zero(received.grad_out, sees);

  Tensor grad_weights = at::matmul(fold(grad_out), seen_or_zero(keys.value, seen).transpose(2, 3));
  grad_weights = at::where(logits.visible, grad_weights.view(logits.visible.sizes()), 0.0);
  Tensor delta = received.out.defined()
                     ? grad_out.mul(seen_or_zero(received.out, sees)).sum(-1, /*keepdim=*/true)
                     : weights.mul(grad_weights).sum(-1, /*keepdim=*/true);
  if (received.grad_lse.defined()) delta = delta.sub(received.grad_lse.unsqueeze(-1));
  const Tensor grad_scores = at::where(logits.visible, weights.mul(grad_weights.sub(delta)), 0.0);
  if (options.sinks.given) {
    Tensor grad_sinks = sink_weights.mul(delta);
    if (all.count.defined()) {
      const Tensor row = at::arange(first, first + rows, all.count.options());
      grad_sinks = at::where(row.lt(all.count).view({problem.batch, 1, rows, 1}), grad_sinks, 0.0);
    }
    sums.sinks.sub_(grad_sinks.sum({0, 2, 3}));
  }
  if (options.alibi_slopes.given) {
    const Tensor by_distance = grad_scores.to(at::kDouble).mul(logits.distances).sum({2, 3});
    sums.alibi_slopes.add_(by_distance.sum_to_size(sums.alibi_slopes.sizes()));
  }

  Tensor grad_products = grad_scores.mul(problem.scale);
  if (options.softcap > 0.0) {
    const Tensor saturation = logits.products.mul(problem.scale / options.softcap).tanh();
    const Tensor slope = at::where(logits.visible, saturation.square().neg().add(1.0), 0.0);
    grad_products = grad_products.mul(slope.to(at::kFloat));
  }
  const Tensor folded = fold(grad_products);
  sums.query.narrow(2, first, rows)
      .add_(at::matmul(folded, seen_or_zero(keys.key, seen)).view(sums.query.narrow(2, first, rows).sizes()));
  sums.key.add_(at::matmul(folded.transpose(2, 3), query));
  sums.value.add_(at::matmul(fold(weights).transpose(2, 3), fold(grad_out)));
}

void add_gradients(const Rows& rows, const Received& received, const Sums& sums) {
  const Problem& problem = rows.call.problem;
  const int64_t scores_per_row = problem.batch * problem.q_heads * std::max<int64_t>(problem.kv_len, 1);
  if (problem.batch * problem.q_heads * problem.q_len == 0) return;
  const Keys keys = keys_of(rows.call);
  const int64_t slice = std::max<int64_t>(1, kMaxScores / scores_per_row);
  for (int64_t first = 0; first < problem.q_len; first += slice) {
    add_rows(rows, keys, received, first, std::min(slice, problem.q_len - first), sums);
  }
}

Sums zero_sums(const Call& call) {
  const auto floats = call.query.options().dtype(at::kFloat);
  const auto zeros_like = [&](const Tensor& tensor) { return at::zeros(tensor.sizes(), floats); };
  const bool own_slopes = call.problem.options.alibi_slopes.of_sequences;
  return {zeros_like(call.query), zeros_like(call.key), zeros_like(call.value),
          at::zeros({call.problem.q_heads}, floats),
          at::zeros({own_slopes ? call.problem.batch : 1, call.problem.q_heads}, floats)};
}

// The gradients of a sequence under a block mask.
void add_visible_blocks(const Sequence& sequence, const Call& call, const Received& received,
                        const Sums& sums) {
  visit_block_rows(call, [&](const BlockRows& rows) {
    const auto zeros_like = [&](const Tensor& keys) { return at::zeros(keys.sizes(), sums.key.options()); };
    const Tensor key = zeros_like(rows.call.key), value = zeros_like(rows.call.value);
    add_gradients({.call = rows.call,
                   .first_position = sequence.first_position().add(rows.row),
                   .key_positions = rows.key_positions},
                  received.map([&](const Tensor& of) { return rows.rows_of(of); }),
                  {rows.rows_of(sums.query), key, value, sums.sinks.narrow(0, rows.head, rows.heads),
                   sums.alibi_slopes.narrow(1, rows.head, rows.heads)});
    rows.add_keys(sums.key, key);
    rows.add_keys(sums.value, value);
  });
}

Sums one_by_one(const BackwardCall& call) {
  const Sums sums = zero_sums(call);
  for (const Sequence& sequence : sequences_of(call)) {
    Call own = sequence.call;
    own.query = sequence.rows_of(call.query);
    const auto rows_of = [&](const Tensor& numbers) {  // [batch, heads, length], or [heads, length]
      return numbers.defined() ? sequence.rows_of(numbers, 1) : numbers;
    };
    const Received received = {sequence.rows_of(call.grad_out), rows_of(call.grad_lse), rows_of(call.lse),
                               call.out.defined() ? sequence.rows_of(call.out) : call.out};
    const bool own_slopes = call.problem.options.alibi_slopes.of_sequences;
    const Sums own_sums = {sequence.rows_of(sums.query), sequence.keys_of(sums.key),
                           sequence.keys_of(sums.value), sums.sinks,
                           own_slopes ? sums.alibi_slopes.narrow(0, sequence.number, 1) : sums.alibi_slopes};
    if (call.problem.block_rows > 0) {
      add_visible_blocks(sequence, own, received, own_sums);
    } else {
      add_gradients({.call = own, .first_position = sequence.first_position()}, received, own_sums);
    }
  }
  return sums;
}

// Adds the gradients of padded keys to packed ones.
Tensor unpadded_keys(const Call& call, const Tensor& padded, const Tensor& packed) {
  const Problem& problem = call.problem;
  const Tensor place = at::arange(problem.kv_len, call.cu_seqlens_k.options().dtype(at::kLong));
  const Tensor index = first_packed_keys(call).add(place).clamp_max(call.key.size(0) - 1);
  const Tensor exists = place.lt(key_counts(call)).view({problem.batch, 1, problem.kv_len, 1});
  const Tensor rows = at::where(exists, padded, 0.0).transpose(1, 2).flatten(0, 1);
  return packed.index_add(0, index.flatten(), rows);
}

// Pads the packed rows and keys. If some do not fit, every gradient is NaN.
Sums of_packed(const BackwardCall& call) {
  const Problem& problem = call.problem;
  Sums sums = zero_sums(call);
  if (problem.batch == 0 || problem.q_len == 0 || problem.kv_len == 0) return sums;
  const PaddedRows rows(call);
  const Call padded = rows.padded(call);
  const auto pad_numbers = [&](const Tensor& numbers) {
    return numbers.defined() ? rows.pad(numbers.transpose(0, 1)) : numbers;
  };
  const Received received = {rows.pad(call.grad_out), pad_numbers(call.grad_lse), pad_numbers(call.lse),
                             call.out.defined() ? rows.pad(call.out) : call.out};
  const auto zeros = [&](int64_t heads, int64_t length, int64_t dim) {
    return at::zeros({problem.batch, heads, length, dim}, sums.query.options());
  };
  const Sums padded_sums = {zeros(problem.q_heads, rows.q_len, problem.head_dim),
                            zeros(problem.kv_heads, padded.problem.kv_len, problem.head_dim),
                            zeros(problem.kv_heads, padded.problem.kv_len, problem.value_dim), sums.sinks,
                            sums.alibi_slopes};
  add_gradients({.call = padded, .first_position = rows.first_position, .count = rows.count}, received,
                padded_sums);
  sums.query = at::where(rows.owned.view({-1, 1, 1}), rows.unpad(padded_sums.query), 0.0);
  sums.key = unpadded_keys(padded, padded_sums.key, sums.key);
  sums.value = unpadded_keys(padded, padded_sums.value, sums.value);
  const Tensor lost = rows.lost.any();
  for (Tensor* sum : {&sums.query, &sums.key, &sums.value, &sums.sinks, &sums.alibi_slopes}) {
    *sum = sum->masked_fill(lost, std::numeric_limits<double>::quiet_NaN());
  }
  return sums;
}

Sums together(const BackwardCall& call) {
  if (call.problem.packed) return of_packed(call);
  const Sums sums = zero_sums(call);
  add_gradients({.call = call, .first_position = first_positions(call)},
                {call.grad_out, call.grad_lse, call.lse, call.out}, sums);
  return sums;
}

}  // namespace

Gradients run_in_torch(const BackwardCall& rounded, bool may_wait) {
  BackwardCall call = rounded;
  if (call.out_remainder.defined()) {
    call.out = call.out.to(at::kFloat).add(call.out_remainder.to(at::kFloat), 1.0 / kRemainderScale);
  }
  const Sums sums = may_wait || call.problem.block_rows > 0 ? one_by_one(call) : together(call);
  const Gradients gradients = empty_gradients(call);
  const auto& [query, key, value, sinks, alibi_slopes] = gradients;
  query.copy_(sums.query);
  key.copy_(sums.key);
  value.copy_(sums.value);
  if (call.sinks.defined()) sinks.copy_(sums.sinks);
  if (call.alibi_slopes.defined()) alibi_slopes.copy_(sums.alibi_slopes.view(alibi_slopes.sizes()));
  return gradients;
}

}  // namespace fattn
