// Tensors -> MergeProblem: partial results with their log-sum-exp, or with the sums of their weights.
#include <c10/util/Exception.h>

#include "tensor_checks.h"

namespace fattn {

namespace {

using at::Tensor;

MergeCall merge_of(const Tensor& outs, const Tensor& lses) {
  const char* name = name_of(Op::kMerge);
  check_rank(name, "outs", outs, 5, "[parts, batch, heads, length, head_dim]");
  check_rank(name, "lses", lses, 4, "[parts, batch, heads, length]");
  check_device(name, "lses", lses, outs, "outs");
  const DType dtype = dtype_of(outs.scalar_type());
  check_float(name, "outs", outs);
  TORCH_CHECK_TYPE(lses.scalar_type() == at::kFloat, name, ": lses is ", dtype_name(lses),
                   " and must be torch.float32; convert it with .float()");
  TORCH_CHECK_VALUE(outs.sizes().slice(0, 4) == lses.sizes(), name, ": outs has shape ", outs.sizes(),
                    " and lses ", lses.sizes(),
                    "; lses must have the shape of outs without its last dimension");
  MergeProblem problem;
  problem.dtype = problem.out_dtype = dtype;
  problem.parts = outs.size(0);
  problem.rows = outs.size(1) * outs.size(2) * outs.size(3);
  problem.head_dim = outs.size(4);
  return {.problem = problem, .outs = outs, .lses = lses};
}

}  // namespace

MergeCall describe_merge(const Arguments& arguments) {
  return merge_of(arguments.tensor("outs"), arguments.tensor("lses"));
}

MergeCall describe_merge_parts(const Arguments& arguments) {
  const Tensor& sums = arguments.tensor("sums");
  const auto dtype = arguments.get<at::ScalarType>("dtype");
  TORCH_CHECK_VALUE(
      sums.dim() == 5 && sums.size(4) == kSumFloats, "fattn.merge: sums has shape ", sums.sizes(),
      " and must be [parts, batch, heads, length, 4]; pass the sums that the overloads part return");
  TORCH_CHECK_TYPE(is_float(dtype_of(dtype)), "fattn.merge: dtype is ", dtype,
                   " and must be torch.float32, torch.float16 or torch.bfloat16");
  MergeCall call = merge_of(arguments.tensor("outs"), sums.select(4, 0));
  call.lses = sums;
  call.problem.sums = true;
  call.problem.out_dtype = dtype_of(dtype);
  return call;
}

}  // namespace fattn
