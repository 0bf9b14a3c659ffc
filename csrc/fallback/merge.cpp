// merge in plain PyTorch.
#include <limits>

#include <ATen/ops/amax.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/where.h>

#include "../describe/tensor_checks.h"
#include "fallback.h"

namespace fattn {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

}  // namespace fattn
