// Tensors -> Problem of a backward: adds the operands that its forward lacks.
#include "calls.h"

#include <string_view>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "layout.h"
#include "tensor_checks.h"

namespace fattn {
namespace {

using at::Tensor;

// The strides of a tensor with the rows of the result.
Strides3 strides_of(const Problem& problem, const Tensor& rows) {
  Strides3 strides = layout_of(rows).by_dimension();
  if (problem.packed) swap_rows_and_heads(strides);
  return strides;
}

// A tensor with the shape of a result: out or lse.
void check_of_result(const Call& call, const char* name, const Tensor& tensor, std::string_view dimensions,
                     at::IntArrayRef shape) {
  const char* op = name_of(call.problem.op);
  check_rank(op, name, tensor, int64_t(shape.size()), dimensions);
  check_device(op, name, tensor, call.query);
  TORCH_CHECK_VALUE(tensor.sizes() == shape, op, ": ", name, " has shape ", tensor.sizes(),
                    " and the result of the forward ", shape, "; they must be equal");
}

void check_row_numbers(const Call& call, const char* name, const Tensor& numbers, at::IntArrayRef shape) {
  check_of_result(call, name, numbers, call.problem.packed ? "[heads, rows]" : "[batch, heads, length]",
                  shape);
  TORCH_CHECK_TYPE(numbers.scalar_type() == at::kFloat, name_of(call.problem.op), ": ", name, " is ",
                   dtype_name(numbers), " and must be torch.float32; convert it with .float()");
}

// Adds the operands that only the backward has.
BackwardCall with_gradients(Call forward, const Arguments& arguments) {
  BackwardCall call{std::move(forward)};
  Problem& problem = call.problem;
  const char* op = name_of(problem.op);
  const ResultSizes sizes = result_sizes(problem);
  const std::string_view dimensions = problem.packed ? kPacked : kHeadsFirst;

  call.grad_out = arguments.tensor("grad_out");
  check_of_result(call, "grad_out", call.grad_out, dimensions, sizes.out);
  TORCH_CHECK_TYPE(call.grad_out.scalar_type() == call.query.scalar_type(), op, ": grad_out is ",
                   dtype_name(call.grad_out), " and query ", dtype_name(call.query),
                   "; convert grad_out with .to(query.dtype)");
  problem.grad_out = strides_of(problem, call.grad_out);
  problem.vector_aligned = problem.vector_aligned && layout_of(call.grad_out).vector_aligned;

  if (const OptionalTensor grad_lse = arguments.optional_tensor("grad_lse")) {
    check_row_numbers(call, "grad_lse", *grad_lse, sizes.lse);
    problem.has_grad_lse = true;
    call.grad_lse = *grad_lse;
  }
  call.lse = arguments.tensor("lse");
  check_row_numbers(call, "lse", call.lse, sizes.lse);

  const OptionalTensor out = arguments.optional_tensor("out");
  if (out.has_value()) {
    check_of_result(call, "out", *out, dimensions, sizes.out);
    TORCH_CHECK_TYPE(out->scalar_type() == at::kFloat || out->scalar_type() == call.query.scalar_type(), op,
                     ": out is ", dtype_name(*out), " and query ", dtype_name(call.query),
                     "; pass the out of the forward, or leave it out");
  }
  const OptionalTensor remainder = arguments.optional_tensor("out_remainder");
  if (remainder.has_value()) {
    check_of_result(call, "out_remainder", *remainder, dimensions, sizes.out);
    TORCH_CHECK_TYPE(
        out.has_value() && out->scalar_type() != at::kFloat && remainder->scalar_type() == out->scalar_type(),
        op, ": out_remainder is ", dtype_name(*remainder), " and out ",
        out.has_value() ? dtype_name(*out) : "None",
        "; pass both of a 16-bit forward, or leave out_remainder out");
    problem.has_out_remainder = true;
    problem.out_remainder = strides_of(problem, *remainder);
    call.out_remainder = *remainder;
  }
  problem.has_saved_out = out.has_value() && (out->scalar_type() == at::kFloat || remainder.has_value());
  if (!problem.has_saved_out) return call;
  problem.out = strides_of(problem, *out);
  call.out = *out;
  return call;
}

}  // namespace

BackwardCall describe_prefill_backward(const Arguments& arguments) {
  return with_gradients(describe_prefill_of(Op::kPrefillBackward, arguments), arguments);
}

BackwardCall describe_varlen_prefill_backward(const Arguments& arguments) {
  return with_gradients(describe_varlen_prefill_of(Op::kVarlenPrefillBackward, arguments), arguments);
}

Gradients empty_gradients(const Call& call) {
  const auto like = [&](const Tensor& tensor) {
    if (!tensor.defined()) return at::empty({0}, call.query.options().dtype(at::kFloat));
    return at::empty(tensor.sizes(), tensor.options());
  };
  return {like(call.query), like(call.key), like(call.value), like(call.sinks), like(call.alibi_slopes)};
}

}  // namespace fattn
