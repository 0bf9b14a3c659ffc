// rms_norm in plain PyTorch, with the roundings of the kernel.
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>

#include "../describe/tensor_checks.h"
#include "fallback.h"

namespace fattn {

using at::Tensor;

Tensor normed(const Tensor& rows, const Tensor& weight, NormForm norm, double eps) {
  const Tensor x = rows.to(at::kFloat);
  Tensor normal = x.mul(at::rsqrt(x.square().mean(-1, /*keepdim=*/true).add(eps)));
  if (norm == kNormRounded) normal = normal.to(rows.scalar_type()).to(at::kFloat);
  if (!weight.defined()) return normal;
  const Tensor w = weight.to(at::kFloat);
  return normal.mul(norm == kNormPlusOne ? w.add(1.0) : w);
}

Tensor run_in_torch(const RmsNormCall& call) {
  const RmsNormProblem& p = call.problem;
  Tensor result = normed(call.x, call.weight, p.norm, p.eps);
  if (p.gate != kGateNone) {
    if (p.norm == kNormRounded && p.weight_dtype == p.dtype) {
      result = result.to(call.x.scalar_type()).to(at::kFloat);
    }
    const Tensor gate = call.gate.to(at::kFloat);
    result = result.mul(p.gate == kGateSilu ? at::silu(gate) : gate.sigmoid());
  }
  return result.to(scalar_type_of(p.out_dtype)).contiguous();
}

}  // namespace fattn
