// merge, mask_map and the operators on logits in plain PyTorch; logits in float32.
#include <limits>

#include <ATen/ops/amax.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>

#include "../describe/tensor_checks.h"
#include "fallback.h"

namespace fattn {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor softcapped(const Tensor& logits, double cap) { return logits.div(cap).tanh().mul(cap); }

// -inf hides its column at any cap. A row with only -inf becomes 0.
Tensor softmaxed(const Tensor& logits, double cap) {
  const Tensor hidden = logits.eq(-kInfinity);
  const Tensor capped = cap > 0.0 ? at::where(hidden, logits, softcapped(logits, cap)) : logits;
  return at::softmax(capped, -1).masked_fill(hidden.all(-1, /*keepdim=*/true), 0.0);
}

// Whether all rows of each cell are set, for each key: [.., row of cells, column of cells, key]. Missing rows
// count as set, missing keys as `missing_keys`.
Tensor all_rows_of_cells(const Tensor& entries, const MaskMapProblem& p, bool missing_keys) {
  const auto missing = [](int64_t length, int64_t cell) { return (cell - length % cell) % cell; };
  const Tensor rows = at::constant_pad_nd(entries.to(at::kByte), {0, 0, 0, missing(p.rows, kCellRows)}, 1);
  const Tensor padded = at::constant_pad_nd(rows, {0, missing(p.keys, kCellKeys)}, missing_keys);
  return padded.unflatten(3, {-1, kCellKeys}).unflatten(2, {-1, kCellRows}).eq(1).all(3);
}

// A bit for each key fragment that is hidden from every row of the cell. A mask with one key is broadcast.
Tensor hidden_fragments(const Tensor& hidden, const MaskMapProblem& p) {
  const Tensor fragments = all_rows_of_cells(hidden, p, false).unflatten(4, {-1, kFragment}).all(5);
  Tensor bits = fragments.select(4, 0).to(at::kByte);
  for (int f = 1; f < kCellFragments; ++f) {
    bits = bits.add(fragments.select(4, f).to(at::kByte), 1 << f);
  }
  return bits;
}

}  // namespace

std::tuple<Tensor, Tensor> run_in_torch(const MergeCall& call) {
  const Tensor logits = call.problem.sums ? call.lses.select(-1, 1) : call.lses;
  const Tensor top = at::amax(logits, 0);
  const Tensor shift = top.masked_fill(top.eq(-kInfinity), 0.0);
  const Tensor weights = at::exp(logits.sub(shift));  // 0 for a part without keys
  const Tensor sum = (call.problem.sums ? weights.mul(call.lses.select(-1, 2)) : weights).sum(0);
  const Tensor scaled = weights.div(sum.masked_fill(sum.eq(0.0), 1.0)).unsqueeze(-1);
  // A part without keys is ignored: it may hold NaN.
  const Tensor has_keys = logits.ne(-kInfinity).unsqueeze(-1);
  const Tensor parts = at::where(has_keys, call.outs.to(at::kFloat).mul(scaled), 0.0);
  return {parts.sum(0).to(scalar_type_of(call.problem.out_dtype)), at::log(sum).add(shift)};
}

Tensor run_in_torch(const LogitsCall& call) {
  const Tensor logits = call.logits.to(at::kFloat);
  const double cap = call.problem.softcap;
  Tensor result;
  if (call.problem.op == Op::kSoftmax) result = softmaxed(logits, cap);
  if (call.problem.op == Op::kSoftcap) result = softcapped(logits, cap);
  return result.to(call.logits.scalar_type()).contiguous();
}

Tensor run_in_torch(const MaskMapCall& call) {
  const MaskMapProblem& p = call.problem;
  const Tensor mask = call.mask.view({p.batch, p.heads, p.rows, p.keys});
  const bool is_bool = p.dtype == DType::kBool;
  const Tensor hidden = is_bool ? mask.logical_not() : mask.eq(-kInfinity);
  const Tensor whole = is_bool ? mask : mask.eq(0.0);
  const Tensor mixed = hidden_fragments(hidden, p).mul(1 << kCellKindBits).add(int{kCellMixed});
  const Tensor map = mixed.masked_fill(all_rows_of_cells(whole, p, true).all(4), int{kCellWhole});
  return map.masked_fill(all_rows_of_cells(hidden, p, true).all(4), int{kCellHidden});
}

}  // namespace fattn
