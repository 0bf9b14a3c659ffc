// Tensors -> RmsNormProblem.
#include <algorithm>

#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include "layout.h"
#include "row_dims.h"
#include "tensor_checks.h"
#include "written_caches.h"

namespace fattn {
namespace {

using at::Tensor;

// The dimensions of the tensors that the kernel reads: x and gate, or their copies.
RowDims dims_of(const RmsNormCall& call) {
  const auto strides_of = [&](const Tensor& rows, bool copied) {
    return copied ? c10::contiguous_strides(call.x.sizes()) : c10::DimVector(rows.strides());
  };
  const bool gated = call.gate.defined();
  const c10::DimVector strides = strides_of(call.x, call.copy_x);
  const c10::DimVector others = gated ? strides_of(call.gate, call.copy_gate) : strides;
  RowDims dims;
  for (int64_t dim = call.x.dim() - 2; dim >= 0; --dim) dims.add(call.x.size(dim), strides[dim], others[dim]);
  return dims;
}

void check_gate(const char* op, const Tensor& gate, const Tensor& x) {
  check_device(op, "gate", gate, x, "x");
  TORCH_CHECK_VALUE(gate.sizes() == x.sizes(), op, ": gate has shape ", gate.sizes(), " and x ", x.sizes(),
                    "; pass a gate for each element of x");
  TORCH_CHECK_TYPE(gate.scalar_type() == x.scalar_type(), op, ": gate is ", dtype_name(gate), " and x ",
                   dtype_name(x), "; convert gate with .to(x.dtype)");
}

}  // namespace

RmsNormCall describe_rms_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& gate,
                              double eps, std::string_view norm, std::string_view activation,
                              bool float32_out) {
  RmsNormCall call{.problem = {.norm = norm_form_of(name_of(Op::kRmsNorm), norm), .eps = eps}, .x = x};
  RmsNormProblem& problem = call.problem;
  const char* op = name_of(Op::kRmsNorm);
  TORCH_CHECK_TYPE(x.defined(), op, ": x is None; pass a tensor");
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x has no dimensions; pass rows [.., columns]");
  check_float(op, "x", x);
  const int gate_kind = choice_of(op, "activation", activation, {"silu", "sigmoid"}) + kGateSilu;
  problem.dtype = problem.weight_dtype = dtype_of(x.scalar_type());
  problem.out_dtype = float32_out ? DType::kFloat32 : problem.dtype;
  bool aligned = x.size(-1) % kLogitsVector == 0;
  if (weight.has_value()) {
    check_norm_weight(op, "weight", *weight, "x", x);
    problem.weight_dtype = dtype_of(weight->scalar_type());
    problem.has_weight = true;
    call.weight = weight->contiguous();
    aligned = aligned && is_multiple(call.weight);
  } else if (problem.norm == kNormPlusOne) {
    problem.norm = kNormFloat;  // the kernel's weight is 1
  }
  if (gate.has_value()) {
    check_gate(op, *gate, x);
    problem.gate = GateKind(gate_kind);
    call.gate = *gate;
    call.copy_gate = !has_contiguous_rows(*gate);
  }
  call.copy_x = !has_contiguous_rows(x);
  RowDims dims = dims_of(call);
  if (dims.sizes.size() > size_t{kLogitsDims}) {
    call.copy_x = true;
    call.copy_gate = call.gate.defined();
    dims = dims_of(call);
  }
  problem.dims = std::max(static_cast<int>(dims.sizes.size()), 1);
  std::copy(dims.sizes.begin(), dims.sizes.end(), problem.sizes.begin());
  std::copy(dims.strides.begin(), dims.strides.end(), problem.strides.begin());
  std::copy(dims.others.begin(), dims.others.end(), problem.gate_strides.begin());
  for (const int64_t size : dims.sizes) problem.rows *= size;
  problem.columns = x.size(-1);
  problem.vector_aligned = aligned && (call.copy_x || is_multiple(x)) &&
                           (!call.gate.defined() || call.copy_gate || is_multiple(call.gate));
  return call;
}

}  // namespace fattn
