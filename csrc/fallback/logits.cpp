// The operators on logits in plain PyTorch, in float32.
#include <limits>

#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>

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

}  // namespace

Tensor run_in_torch(const LogitsCall& call) {
  const Tensor logits = call.logits.to(at::kFloat);
  const double cap = call.problem.softcap;
  Tensor result;
  if (call.problem.op == Op::kSoftmax) result = softmaxed(logits, cap);
  if (call.problem.op == Op::kSoftcap) result = softcapped(logits, cap);
  return result.to(call.logits.scalar_type()).contiguous();
}

}  // namespace fattn
