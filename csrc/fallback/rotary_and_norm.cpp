// rms_norm, rotary and rotary_write in plain PyTorch, with the roundings of the kernels.
#include "../describe/tensor_checks.h"
#include "fallback.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>

namespace fattn {
namespace {

using at::Tensor;

// In float32, times the weight unless it is undefined.
Tensor normed(const Tensor& rows, const Tensor& weight, NormForm norm, double eps) {
  const Tensor x = rows.to(at::kFloat);
  Tensor normal = x.mul(at::rsqrt(x.square().mean(-1, /*keepdim=*/true).add(eps)));
  if (norm == kNormRounded) normal = normal.to(rows.scalar_type()).to(at::kFloat);
  if (!weight.defined()) return normal;
  const Tensor w = weight.to(at::kFloat);
  return normal.mul(norm == kNormPlusOne ? w.add(1.0) : w);
}

Tensor rotated(const Tensor& rows, const RotaryCall& call) {
  const RotaryProblem& p = call.problem;
  const at::ScalarType dtype = rows.scalar_type();
  const int64_t pairs = p.rotary_dim / 2, end = p.rotary_offset + p.rotary_dim;
  const bool narrow = p.table_columns == pairs;
  const bool rounds = p.table_dtype == p.write.dtype;
  const Tensor part = rows.slice(-1, p.rotary_offset, end);
  const bool halves = p.style == kStyleHalves;
  const Tensor x = halves ? part.slice(-1, 0, pairs) : part.slice(-1, 0, p.rotary_dim, 2);
  const Tensor y = halves ? part.slice(-1, pairs) : part.slice(-1, 1, p.rotary_dim, 2);
  const auto column = [&](const Tensor& table, bool second) {
    const int64_t from = second && !narrow ? pairs : 0;
    return table.slice(-1, from, from + pairs).unsqueeze(1).to(at::kFloat);
  };
  const auto product = [&](const Tensor& number, const Tensor& factor) {
    const Tensor exact = number.to(at::kFloat).mul(factor);
    return rounds ? exact.to(dtype).to(at::kFloat) : exact;
  };
  const Tensor first = product(x, column(call.cos, false)).add(product(y.neg(), column(call.sin, false)));
  const Tensor second = product(y, column(call.cos, true)).add(product(x, column(call.sin, true)));
  const Tensor turned =
      p.style == kStylePairs ? at::stack({first, second}, -1).flatten(-2) : at::cat({first, second}, -1);
  return at::cat({rows.slice(-1, 0, p.rotary_offset), turned.to(dtype), rows.slice(-1, end)}, -1);
}

// The slot of each token; -1 drops it.
Tensor slots_of(const RotaryCall& call) {
  const RotaryProblem& p = call.problem;
  if (p.has_slots) return call.slot_mapping.reshape(-1);
  const auto options = call.query.options().dtype(at::kLong);
  const int64_t capacity = p.write.block_size;
  const Tensor position = at::arange(p.q_len, options).add(p.params.start);
  const int64_t batch = call.query.size(0);
  const Tensor first = at::arange(batch, options).mul(capacity).unsqueeze(1);
  Tensor slots = first.add(position);
  if (p.has_starts) {
    const Tensor starts = call.starts.to(at::kLong).expand({batch}).unsqueeze(1);
    const Tensor kept = starts.ge(0).logical_and(starts.lt(position.neg().add(capacity)));
    slots = slots.add(starts).masked_fill(kept.logical_not(), -1);
  }
  return slots.reshape(-1);
}

Tensor as_tokens(const Tensor& rows) { return rows.transpose(1, 2).flatten(0, 1); }

}  // namespace

Tensor run_in_torch(const RmsNormCall& call) {
  const RmsNormProblem& p = call.problem;
  Tensor result = normed(call.rows, call.weight, p.norm, p.eps);
  if (p.gate != kGateNone) {
    const bool rounds = p.norm == kNormRounded && p.weight_dtype == p.dtype;
    if (rounds) result = result.to(call.x.scalar_type()).to(at::kFloat);
    const Tensor gate = call.gates.to(at::kFloat);
    result = result.mul(p.gate == kGateSilu ? at::silu(gate) : gate.sigmoid());
  }
  return result.to(scalar_type_of(p.out_dtype)).contiguous().view(call.x.sizes());
}

std::vector<Tensor> run_in_torch(const RotaryCall& call) {
  const auto rotate = [&](const Tensor& rows, const Tensor& norm) {
    const RotaryProblem& p = call.problem;
    const Tensor heads = norm.defined() ? normed(rows, norm, p.norm, p.eps).to(rows.scalar_type()) : rows;
    return empty_rows(call, rows).copy_(rotated(heads, call));
  };
  const Tensor out = rotate(call.query, call.query_norm), key = rotate(call.key, call.key_norm);
  if (call.problem.op == Op::kRotary) return {out, key};
  CacheWriteCall write{call, call.problem.write};
  write.key = as_tokens(key);
  write.value = as_tokens(rows_to_read(call.value, call.copy_value));
  write.slot_mapping = slots_of(call);
  write.copy_key = write.copy_value = false;
  run_in_torch(write);
  return {out};
}

}  // namespace fattn
