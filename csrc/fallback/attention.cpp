// Attention in float32 with whole score matrices, a slice of query rows at a time. It cannot use
// F.scaled_dot_product_attention, which returns no log-sum-exp and spreads NaN from masked keys to every row.
#include "attention.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "../describe/tensor_checks.h"

namespace fattn {

using at::Tensor;

// Reads cu_seqlens_k like csrc/kernels/prefill/packed.h.
Tensor first_packed_keys(const Call& call) {
  const Tensor starts = call.cu_seqlens_k.to(at::kLong).narrow(0, 0, call.problem.batch);
  return starts.clamp(0, call.key.size(0)).unsqueeze(1);
}

// Clamps lengths that are out of range.
Tensor key_counts(const Call& call) {
  const Problem& problem = call.problem;
  if (problem.packed_keys) {
    const Tensor ends = call.cu_seqlens_k.to(at::kLong).narrow(0, 1, problem.batch).unsqueeze(1);
    return ends.clamp_max(call.key.size(0)).sub(first_packed_keys(call)).clamp(0, problem.kv_len);
  }
  if (!problem.has_seq_lens) {
    return at::full({problem.batch, 1}, problem.kv_len, call.query.options().dtype(at::kLong));
  }
  return call.seq_lens.to(at::kLong).clamp(0, problem.kv_len).unsqueeze(1);
}

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLog2E = 1.4426950408889634;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kFar = int64_t{1} << 32;        // exceeds the distance between any two positions
constexpr int64_t kMaxScores = int64_t{1} << 26;  // scores per slice of query rows: 256 MiB

// Gathers the blocks of the pool in the order of the block table. Entries outside the pool have no keys.
Keys gather_blocks(const Call& call) {
  const Problem& problem = call.problem;
  const Tensor table = call.block_tables.to(at::kLong);
  const Tensor valid = table.ge(0).logical_and(table.lt(problem.num_blocks));
  const Tensor blocks = table.masked_fill(valid.logical_not(), 0).reshape({-1});
  const auto rows_of = [&](const Tensor& pool) {
    if (!pool.defined()) return pool;
    std::vector<int64_t> shape = {problem.batch, problem.kv_len};
    shape.insert(shape.end(), pool.sizes().begin() + 2, pool.sizes().end());
    // An empty pool has no block 0 to stand in for invalid entries.
    if (problem.num_blocks == 0) return at::zeros(shape, pool.options()).transpose(1, 2);
    return pool.index_select(0, blocks).reshape(shape).transpose(1, 2);
  };
  const Tensor exists = valid.unsqueeze(2)
                            .expand({problem.batch, problem.max_blocks, problem.block_size})
                            .reshape({problem.batch, problem.kv_len});
  return {rows_of(call.key), rows_of(call.value), rows_of(call.key_scales), rows_of(call.value_scales),
          exists};
}

// Pads packed keys to kv_len; visible_keys() hides the padding.
Keys gather_rows(const Call& call) {
  const Problem& problem = call.problem;
  const Tensor first = first_packed_keys(call);
  const Tensor index = first.add(at::arange(problem.kv_len, first.options())).clamp_max(call.key.size(0) - 1);
  const auto rows_of = [&](const Tensor& rows) {
    return rows.index_select(0, index.flatten())
        .unflatten(0, {problem.batch, problem.kv_len})
        .transpose(1, 2);
  };
  return {rows_of(call.key), rows_of(call.value), Tensor(), Tensor(),
          at::ones({problem.batch, problem.kv_len}, first.options().dtype(at::kBool))};
}

Keys stored_keys(const Call& call) {
  const Problem& problem = call.problem;
  if (problem.packed_keys) return gather_rows(call);
  if (call.block_tables.defined()) return gather_blocks(call);
  return {call.key, call.value, call.key_scales, call.value_scales,
          at::ones({problem.batch, problem.kv_len}, call.query.options().dtype(at::kBool))};
}

// The values of elements with one scale per row, or without scales.
Tensor scaled(const Tensor& elements, const Tensor& scales) {
  const Tensor numbers = elements.to(at::kFloat);
  return scales.defined() ? numbers.mul(scales.unsqueeze(-1)) : numbers;
}

Tensor int4_numbers(const Tensor& stored, const Tensor& scales) {
  const Tensor nibbles = at::stack({stored.bitwise_and(15), stored.bitwise_right_shift(4)}, -1);
  const Tensor groups = nibbles.flatten(-2).unflatten(-1, {-1, kInt4Group}).to(at::kFloat);
  const auto scale_and_minimum = scales.to(at::kFloat).unsqueeze(-2).unbind(-1);
  return groups.mul(scale_and_minimum[0]).add(scale_and_minimum[1]).flatten(-2);
}

// Decodes the elements of a cache to float32.
Tensor dequantised(const Tensor& stored, const Tensor& scales, KvFormat format) {
  switch (format) {
    case kKvFloat:
    case kKvInt8:
      return scaled(stored, scales);
    case kKvFp8E4M3:
      return scaled(stored.view(at::kFloat8_e4m3fn), scales);
    case kKvInt4:
      return int4_numbers(stored, scales);
  }
  return {};
}

// The absolute positions of the query rows [first, first + rows): [batch or 1, rows].
Tensor row_positions(const Rows& query, int64_t first, int64_t rows) {
  return query.first_position.add(at::arange(first, first + rows, query.first_position.options()));
}

Tensor key_positions(const Rows& query) {
  if (query.key_positions.defined()) return query.key_positions;
  return at::arange(query.call.problem.kv_len, query.call.query.options().dtype(at::kLong));
}

// Visibility under a tree mask: bool [batch, rows, kv_len]. The draft tokens are the newest q_len keys; all
// older keys are visible.
Tensor visible_drafts(const Call& call, const Tensor& key, int64_t first, int64_t rows) {
  const Problem& problem = call.problem;
  const Tensor token = key.sub(key_counts(call).sub(problem.q_len)).unsqueeze(1);
  const Tensor bits =
      call.tree_mask.expand({problem.batch, problem.q_len}).narrow(1, first, rows).unsqueeze(2);
  const Tensor seen = bits.bitwise_right_shift(token.clamp(0, problem.q_len - 1)).bitwise_and(1).ne(0);
  return token.lt(0).logical_or(seen);
}

// Visibility by position for the query rows [first, first + rows): bool [batch, 1, rows, kv_len].
Tensor visible_keys(const Rows& query, const Keys& keys, int64_t first, int64_t rows) {
  const Call& call = query.call;
  const Problem& problem = call.problem;
  const ScoreOptions& options = problem.options;
  const Tensor key = key_positions(query);
  const Tensor position = row_positions(query, first, rows).unsqueeze(2);
  Tensor visible = keys.exists.unsqueeze(1);
  // The keys of visible blocks exist, and may be few.
  if (!query.key_positions.defined()) visible = visible.logical_and(key.lt(key_counts(call)).unsqueeze(1));
  if (query.count.defined()) {
    const Tensor row = at::arange(first, first + rows, key.options());
    visible = visible.logical_and(row.lt(query.count).unsqueeze(2));
  }
  if (problem.is_causal) visible = visible.logical_and(key.le(position));
  if (options.window_left >= 0 || options.window_right >= 0) {
    Tensor seen = key.lt(options.sink_tokens).expand({1, rows, problem.kv_len});
    Tensor in_window = at::ones({1, rows, problem.kv_len}, seen.options());
    if (options.window_left >= 0) in_window = key.ge(position.sub(std::min(options.window_left, kFar)));
    if (options.window_right >= 0) {
      in_window = in_window.logical_and(key.le(position.add(std::min(options.window_right, kFar))));
    }
    visible = visible.logical_and(seen.logical_or(in_window));
  }
  if (options.tree_mask) visible = visible.logical_and(visible_drafts(call, key, first, rows));
  return visible.unsqueeze(1).expand({problem.batch, 1, rows, problem.kv_len});
}

// Applies scale, softcap and ALiBi as csrc/kernels/common/scores.h does. A large bias would round away the
// differences between keys in float32, so the sum is in float64.
Tensor modify_scores(const Call& call, Tensor scores, const Tensor& distances) {
  const ScoreOptions& options = call.problem.options;
  scores = scores.mul(call.problem.scale);
  if (options.softcap > 0.0) scores = scores.div(options.softcap).tanh().mul(options.softcap);
  if (options.alibi_slopes.given) {
    scores = scores.add(call.alibi_slopes.to(at::kDouble).unsqueeze(-1).unsqueeze(-1).mul(distances));
  }
  return scores;
}

// weights @ value. Masked memory never affects the output: hidden values are replaced, as 0 * NaN is NaN.
Tensor weigh_values(const Tensor& weights, const Tensor& visible, const Tensor& value) {
  return at::matmul(weights, at::where(visible.any(-2).unsqueeze(-1), value, 0.0));
}

// Packs the largest logit and the sum of weights of rows, [.., 1], for merge.parts. Scores are in natural
// units here.
Tensor sums_of(const Tensor& logit, const Tensor& sum) {
  return at::cat({logit, logit, sum, at::full_like(sum, kLog2E)}, -1);
}

std::tuple<Tensor, Tensor> attend_rows(const Rows& query_rows, const Keys& keys, int64_t first,
                                       int64_t rows) {
  const Call& call = query_rows.call;
  const Problem& problem = call.problem;
  const Logits logits = logits_of(query_rows, keys, first, rows);
  const Tensor &scores = logits.scores, &visible = logits.visible;
  const Tensor sinks = sink_logits(call);
  const Tensor top = at::maximum(at::amax(scores, -1, /*keepdim=*/true), sinks);
  const Tensor shift = top.masked_fill(top.eq(-kInfinity), 0.0);  // keeps rows without keys from NaN
  const Tensor weights = at::where(visible, at::exp(scores.sub(shift).to(at::kFloat)), 0.0);
  const Tensor sum = weights.sum(-1, /*keepdim=*/true).add(at::exp(sinks.sub(shift)));
  const Tensor weighed =
      weigh_values(fold_heads(weights, problem.kv_heads), fold_heads(visible, problem.kv_heads), keys.value)
          .view({problem.batch, problem.q_heads, rows, problem.value_dim});
  if (!problem.part) {
    return {weighed.div(sum).masked_fill(sum.eq(0.0), 0.0), at::log(sum).add(shift).squeeze(-1)};
  }
  // The weights absorb the rounding error of the float32 logit.
  const Tensor logit = top.to(at::kFloat);
  const Tensor rounded_off = top.sub(logit);
  const Tensor factor = at::where(rounded_off.abs().lt(1.0), rounded_off.exp(), 1.0);
  return {weighed.mul(factor), sums_of(logit, sum.mul(factor).to(at::kFloat))};
}

}  // namespace

Keys keys_of(const Call& call) {
  const Problem& problem = call.problem;
  Keys keys = stored_keys(call);
  keys.key = dequantised(keys.key, keys.key_scales, problem.kv_format);
  // In float32, head_dim consecutive roundings would dominate the error of the result. Not on GPUs, many of
  // which are slow in float64.
  if (problem.dtype == DType::kFloat32 && call.query.is_cpu()) keys.key = keys.key.to(at::kDouble);
  keys.value = dequantised(keys.value, keys.value_scales, problem.kv_format);
  return keys;
}

Tensor sink_logits(const Call& call) {
  if (call.problem.options.sinks.given) return call.sinks.to(at::kFloat).view({1, -1, 1, 1});
  return at::full({1, 1, 1, 1}, -kInfinity, call.query.options().dtype(at::kFloat));
}

Tensor fold_heads(const Tensor& rows, int64_t kv_heads) {
  return rows.reshape({rows.size(0), kv_heads, rows.size(1) / kv_heads * rows.size(2), rows.size(3)});
}

Logits logits_of(const Rows& query_rows, const Keys& keys, int64_t first, int64_t rows) {
  const Call& call = query_rows.call;
  const Problem& problem = call.problem;
  const std::array<int64_t, 4> shape = {problem.batch, problem.q_heads, rows, problem.kv_len};
  const Tensor query =
      fold_heads(call.query.narrow(2, first, rows).to(keys.key.scalar_type()), problem.kv_heads);
  Logits logits;
  logits.visible = visible_keys(query_rows, keys, first, rows).expand(shape);
  logits.products = at::matmul(query, keys.key.transpose(2, 3)).view(shape);
  logits.distances =
      key_positions(query_rows).sub(row_positions(query_rows, first, rows).unsqueeze(2)).unsqueeze(1);
  logits.scores = modify_scores(call, logits.products, logits.distances);
  if (call.attn_mask.defined()) {
    const Tensor mask = call.attn_mask.expand({problem.batch, problem.q_heads, problem.q_len, problem.kv_len})
                            .narrow(2, first, rows);
    if (problem.mask_dtype == DType::kBool) {
      logits.visible = logits.visible.logical_and(mask);
    } else {
      logits.scores = logits.scores.add(mask.to(at::kDouble));
      logits.visible = logits.visible.logical_and(mask.ne(-kInfinity));
    }
  }
  logits.scores = at::where(logits.visible, logits.scores, -kInfinity);
  return logits;
}

// Rows without visible keys have out 0 and the log-sum-exp of the sinks.
std::tuple<Tensor, Tensor> no_key_results(const Call& call) {
  const ResultSizes sizes = result_sizes(call.problem);
  const Tensor logits = sink_logits(call).view({-1, 1});
  const Tensor sinks = logits.masked_fill(logits.eq(kInfinity), kNaN);  // inf - inf, as for rows with keys
  const auto options = call.query.options().dtype(scalar_type_of(out_dtype(call.problem)));
  const Tensor out = at::empty_strided(sizes.out, sizes.out_strides, options).zero_();
  if (call.problem.options.sinks.given) {
    out.masked_fill_(call.problem.packed ? sinks.isnan() : sinks.isnan().unsqueeze(2), kNaN);
  }
  if (!call.problem.part) return {out, at::empty(sizes.lse, sinks.options()).copy_(sinks)};
  const Tensor sums = sums_of(sinks.unsqueeze(-1), sinks.ne(-kInfinity).to(at::kFloat).unsqueeze(-1));
  return {out, at::empty(sizes.lse, sums.options()).copy_(sums)};
}

// Does not write out and lse if there are no keys.
void attend(const Rows& query, const Tensor& out, const Tensor& lse) {
  const Call& call = query.call;
  const Problem& problem = call.problem;
  const int64_t scores_per_row = problem.batch * problem.q_heads * problem.kv_len;
  if (out.numel() == 0 || scores_per_row == 0) return;

  const Keys keys = keys_of(call);
  const int64_t slice = std::max<int64_t>(1, kMaxScores / scores_per_row);
  for (int64_t first = 0; first < problem.q_len; first += slice) {
    const int64_t rows = std::min(slice, problem.q_len - first);
    const auto [slice_out, slice_lse] = attend_rows(query, keys, first, rows);
    out.narrow(2, first, rows).copy_(slice_out);
    lse.narrow(2, first, rows).copy_(slice_lse);
  }
}

}  // namespace fattn
