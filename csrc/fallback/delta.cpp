// Linear attention in plain PyTorch: the recurrences, token by token, without waiting for a GPU.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "fallback.h"

namespace fattn {
namespace {

using at::Tensor;

// Where the tokens of a call [rows * length] are. A token outside every sequence that has a state is not
// kept.
struct Tokens {
  int64_t rows;     // tokens in a step of the recurrence: one per sequence, unless packed
  int64_t length;   // steps
  Tensor sequence;  // of each token, rows first
  Tensor position;  // in its sequence
  Tensor kept;
  Tensor start;  // first token of each sequence
  Tensor count;  // tokens of each sequence
};

Tokens tokens_of(const SequenceOperands& call, const SequenceProblem& p, at::Device device,
                 const Tensor& counts = {}) {
  const auto options = at::TensorOptions(device).dtype(at::kLong);
  const Tensor token = at::arange(p.batch * p.length, options);
  Tokens tokens{.rows = p.batch, .length = p.length};
  if (p.packed) {
    const Tensor cu = call.cu_seqlens.to(at::kLong).clamp(0, p.length);
    tokens.start = cu.slice(0, 0, -1);
    tokens.count = cu.slice(0, 1).sub(tokens.start);
    tokens.sequence =
        at::searchsorted(cu, token, /*out_int32=*/false, /*right=*/true).sub(1).clamp(0, p.sequences - 1);
  } else {
    tokens.start = at::arange(p.batch, options).mul(p.length);
    tokens.count =
        counts.defined() ? counts.to(at::kLong).clamp(0, p.length) : at::full({p.batch}, p.length, options);
    tokens.sequence = token.floor_divide(std::max<int64_t>(p.length, 1));
  }
  tokens.position = token.sub(tokens.start.index_select(0, tokens.sequence));
  tokens.kept =
      tokens.position.ge(0).logical_and(tokens.position.lt(tokens.count.index_select(0, tokens.sequence)));
  if (p.has_slots) {
    const Tensor exists = call.slots.ge(0).logical_and(call.slots.lt(p.states));
    tokens.kept = tokens.kept.logical_and(exists.index_select(0, tokens.sequence));
  }
  return tokens;
}

// A mask of rows, to select rows of a tensor.
Tensor rows_like(const Tensor& mask, const Tensor& tensor) {
  std::vector<int64_t> sizes(static_cast<size_t>(tensor.dim()), 1);
  sizes[0] = mask.size(0);
  return mask.reshape(sizes);
}

// The state of each sequence before its first token.
Tensor initial_states(const SequenceOperands& call, const Tensor& state) {
  if (call.slots.defined() && state.size(0) == 0) {  // all sequences are skipped
    std::vector<int64_t> sizes = state.sizes().vec();
    sizes[0] = call.slots.size(0);
    return at::zeros(sizes, state.options());
  }
  Tensor before = state.clone();
  if (call.slots.defined()) {
    before = state.index_select(0, call.slots.to(at::kLong).clamp(0, state.size(0) - 1));
  }
  if (!call.has_initial_state.defined()) return before;
  return at::where(rows_like(call.has_initial_state, before), before, 0.0);
}

// Writes the states of the sequences that have a slot. Which they are is not read from the device: every
// state is written, the others with themselves.
void write_states(const Tensor& state, const Tensor& after, const Tensor& slots) {
  if (!slots.defined()) {
    state.copy_(after);
    return;
  }
  if (after.size(0) == 0 || state.size(0) == 0) return;
  const auto number = at::arange(state.size(0), slots.options()).unsqueeze(1);
  const Tensor owns = number.eq(slots);
  const Tensor sequence = owns.to(at::kInt).argmax(1);
  state.copy_(at::where(rows_like(owns.any(1), state), after.index_select(0, sequence), state));
}

Tensor in_float(const Tensor& tensor) { return tensor.to(at::kFloat); }

// torch's own round the last elements of a tensor differently, which would depend on other sequences.
Tensor sigmoid(const Tensor& x) { return x.neg().exp().add(1.0).reciprocal(); }
Tensor silu(const Tensor& x) { return x.div(x.neg().exp().add(1.0)); }
Tensor softplus(const Tensor& x) { return at::where(x.gt(20.0), x, x.exp().log1p()); }

Tensor normalised(const Tensor& rows) {
  return rows.mul(at::rsqrt(rows.square().sum(-1, /*keepdim=*/true).add(1e-6)));
}

// Rows [rows * length, value_heads, columns] in float32. Value heads may be two dimensions of `tensor`.
Tensor by_value_head(const Tensor& tensor, int64_t heads, bool has_columns) {
  Tensor rows = in_float(tensor).flatten(0, 1);
  if (rows.dim() > (has_columns ? 3 : 2)) rows = rows.flatten(1, 2);
  if (!has_columns) rows = rows.unsqueeze(-1);
  return rows.size(1) == heads ? rows : rows.repeat_interleave(heads / rows.size(1), 1);
}

// The recurrence. Returns the result [rows * length, value_heads, value_dim] in float32, and changes `states`
// [sequences, value_heads, head_dim, value_dim].
Tensor recurrence(const DeltaOperands& call, const GatedDeltaProblem& p, const Tensor& query,
                  const Tensor& key, const Tensor& value, const Tokens& tokens, Tensor& states) {
  const Tensor a = by_value_head(call.decay, p.value_heads, p.channel_decay);
  const Tensor b = by_value_head(call.beta, p.value_heads, false);
  Tensor log_decay = a, beta = b;
  if (p.raw_gates) {
    const Tensor rate = in_float(call.a_log).exp().neg().unsqueeze(-1);
    const Tensor bias = in_float(p.channel_decay ? call.dt_bias : call.dt_bias.unsqueeze(-1));
    log_decay = softplus(a.add(bias)).mul(rate);
    beta = sigmoid(b);
  }
  const Tensor decay = log_decay.exp();
  const Tensor q = (p.l2norm ? normalised(query) : query).mul(p.scale), k = p.l2norm ? normalised(key) : key;

  const Tensor out = at::zeros(value.sizes(), value.options());
  const auto step = [&](const Tensor& tensor, int64_t t) {
    return tensor.unflatten(0, {tokens.rows, tokens.length}).select(1, t);
  };
  for (int64_t t = 0; t < tokens.length; ++t) {
    const Tensor sequence = step(tokens.sequence, t), kept = step(tokens.kept, t);
    const Tensor before = states.index_select(0, sequence);
    const Tensor key_column = step(k, t).unsqueeze(-1);
    const Tensor decayed = before.mul(step(decay, t).unsqueeze(-1));
    const Tensor read = decayed.mul(key_column).sum(-2);
    const Tensor delta = step(value, t).sub(read).mul(step(beta, t));
    const Tensor after = decayed.add(key_column.mul(delta.unsqueeze(-2)));
    const Tensor result = after.mul(step(q, t).unsqueeze(-1)).sum(-2);
    step(out, t).copy_(at::where(rows_like(kept, result), result, 0.0));
    states.index_copy_(0, sequence, at::where(rows_like(kept, before), after, before));
  }
  return out;
}

// The convolution of x [tokens, channels], and the columns of `before` [sequences, channels, columns] after
// it.
struct Convolved {
  Tensor out;
  Tensor after;
};
Convolved convolved(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& before,
                    const Tokens& tokens, bool activates) {
  const int64_t taps = weight.size(1), sequences = before.size(0), columns = before.size(2);
  const Tensor rows = in_float(x), factors = in_float(weight);
  const Tensor all = at::cat({in_float(before).transpose(1, 2).flatten(0, 1), rows});
  // The rows at these positions of sequences; those before the first token are in the states.
  const auto rows_at = [&](const Tensor& sequence, const Tensor& position) {
    const Tensor token = tokens.start.index_select(0, sequence).add(position).add(sequences * columns);
    const Tensor column = sequence.mul(columns).add(position).add(columns);
    return all.index_select(0, at::where(position.ge(0), token, column).clamp(0, all.size(0) - 1));
  };
  Tensor sum = at::zeros_like(rows);
  if (bias.defined()) sum = sum.add(in_float(bias));
  for (int64_t tap = 0; tap < taps; ++tap) {
    const Tensor row = rows_at(tokens.sequence, tokens.position.sub(taps - 1 - tap));
    sum = sum.add(row.mul(factors.select(1, tap)));
  }
  if (activates) sum = silu(sum);
  const Tensor sequence = at::arange(sequences, tokens.position.options());
  std::vector<Tensor> newest;
  for (int64_t column = 0; column < columns; ++column) {
    newest.push_back(rows_at(sequence, tokens.count.add(column - columns)));
  }
  return {at::where(tokens.kept.unsqueeze(-1), sum, 0.0), at::stack(newest, -1).to(before.scalar_type())};
}

}  // namespace

Tensor run_in_torch(const GatedDeltaCall& call) {
  const GatedDeltaProblem& p = call.problem;
  const Tensor out = at::zeros({p.batch, p.length, p.value_heads, p.value_dim}, call.query.options());
  if (p.sequences == 0) return out;
  const auto floats = call.query.options().dtype(at::kFloat);
  Tensor states = p.has_state ? initial_states(call, call.state)
                              : at::zeros({p.sequences, p.value_heads, p.head_dim, p.value_dim}, floats);
  if (out.numel() > 0) {
    const Tokens tokens = tokens_of(call, p, call.device());
    const auto rows = [&](const Tensor& tensor) { return by_value_head(tensor, p.value_heads, true); };
    out.copy_(recurrence(call, p, rows(call.query), rows(call.key), rows(call.value), tokens, states)
                  .view(out.sizes()));
  }
  if (p.writes_state) write_states(call.state, states, call.slots);
  return out;
}

Tensor run_in_torch(const GatedDeltaStepCall& call) {
  const GatedDeltaStepProblem& p = call.problem;
  const Tensor out = at::zeros({p.batch, p.length, p.value_heads, p.value_dim}, call.query.options());
  if (out.numel() == 0) return out;
  const Tokens tokens = tokens_of(call, p, call.device(), call.counts);
  const auto channels = [&](const Tensor& tensor) { return tensor.flatten(2).flatten(0, 1); };
  const Tensor x = at::cat({channels(call.query), channels(call.key), channels(call.value)}, -1);
  const Tensor before = initial_states(call, call.conv_state);
  const Convolved mixed = convolved(x, call.conv_weight, call.conv_bias, before, tokens, /*activates=*/true);
  const int64_t keys = p.key_heads * p.head_dim;
  const auto heads = [&](int64_t from, int64_t to, int64_t columns) {
    const Tensor rows = mixed.out.slice(1, from, to).unflatten(1, {-1, columns});
    return rows.repeat_interleave(p.value_heads / rows.size(1), 1);
  };
  Tensor states = initial_states(call, call.state);
  const Tensor result = recurrence(call, p, heads(0, keys, p.head_dim), heads(keys, 2 * keys, p.head_dim),
                                   heads(2 * keys, x.size(1), p.value_dim), tokens, states);
  const Tensor gate = by_value_head(call.gate, p.value_heads, true);
  const Tensor normed = result.mul(at::rsqrt(result.square().mean(-1, /*keepdim=*/true).add(p.eps)))
                            .mul(in_float(call.norm_weight))
                            .mul(p.gate == kGateSilu ? silu(gate) : sigmoid(gate));
  out.copy_(at::where(rows_like(tokens.kept, normed), normed, 0.0).view(out.sizes()));
  if (p.writes_state) {
    const Tensor& written = p.conv_state_out ? call.conv_state_out : call.conv_state;
    const Tensor old = initial_states(call, written);
    const Tensor has_tokens = rows_like(tokens.count.gt(0), old);
    write_states(written, at::where(has_tokens, mixed.after, old), call.slots);
    write_states(call.state, states, call.slots);
  }
  return out;
}

Tensor run_in_torch(const CausalConv1dCall& call) {
  const CausalConv1dProblem& p = call.problem;
  const Tensor out = at::zeros(call.x.sizes(), call.x.options());
  if (p.sequences == 0) return out;
  const Tokens tokens = tokens_of(call, p, call.device());
  const Tensor before = p.has_state ? initial_states(call, call.state)
                                    : at::zeros({p.sequences, p.channels, p.taps - 1}, call.x.options());
  const Convolved result = convolved(call.x.flatten(0, 1), call.weight, call.bias, before, tokens, p.silu);
  if (p.has_state) write_states(call.state, result.after, call.slots);
  return out.copy_(result.out.view(out.sizes()));
}

}  // namespace fattn
