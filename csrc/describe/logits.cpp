// Tensors -> LogitsProblem.
#include <algorithm>

#include <c10/util/Exception.h>

#include "../plan/supported.h"
#include "tensor_checks.h"

namespace fattn {
namespace {

using at::Tensor;

// Dimensions, innermost first.
struct Dims {
  c10::SmallVector<int64_t, 8> sizes;
  c10::SmallVector<int64_t, 8> strides;

  // Adds an outer dimension, merged with the last one where the strides allow.
  void add(int64_t size, int64_t stride) {
    if (size == 1) return;
    if (!sizes.empty() && stride == sizes.back() * strides.back()) {
      sizes.back() *= size;
      return;
    }
    sizes.push_back(size);
    strides.push_back(stride);
  }
};

// The first `rank` dimensions.
Dims dims_of(const Tensor& tensor, int64_t rank) {
  Dims dims;
  for (int64_t dim = rank - 1; dim >= 0; --dim) dims.add(tensor.size(dim), tensor.stride(dim));
  return dims;
}

// Whether vector loads can read the rows, and vector stores write the rows of the contiguous result.
bool is_vector_aligned(const LogitsProblem& p, int64_t offset) {
  const bool whole_vectors = p.columns % kLogitsVector == 0 || (!is_row_op(p.op) && p.rows == 1);
  return p.column_stride == 1 && whole_vectors && offset % kLogitsVector == 0 &&
         std::all_of(p.strides.begin(), p.strides.begin() + p.dims,
                     [](int64_t stride) { return stride % kLogitsVector == 0; });
}

}  // namespace

LogitsCall describe_logits(Op op, const Tensor& logits, double softcap) {
  const bool by_row = is_row_op(op);
  const char* name = by_row ? "scores" : "x";
  TORCH_CHECK_TYPE(logits.defined(), name_of(op), ": ", name, " is None; pass a tensor");
  const DType dtype = dtype_of(logits.scalar_type());
  TORCH_CHECK_TYPE(is_float(dtype), name_of(op), ": ", name, " is ", dtype_name(logits),
                   " and must be torch.float32, torch.float16 or torch.bfloat16");
  LogitsCall call{.problem = {.op = op, .dtype = dtype, .softcap = softcap}, .logits = logits};
  LogitsProblem& problem = call.problem;

  // Rows are along the last dimension; for an element op, along all dimensions that merge with it.
  Dims rows;
  if (by_row && logits.dim() > 0) {
    rows = dims_of(logits, logits.dim() - 1);
    problem.columns = logits.size(-1);
    problem.column_stride = logits.stride(-1);
  } else if (!by_row) {
    rows = dims_of(logits, logits.dim());
    if (!rows.sizes.empty()) {
      problem.columns = rows.sizes.front();
      problem.column_stride = rows.strides.front();
      rows.sizes.erase(rows.sizes.begin());
      rows.strides.erase(rows.strides.begin());
    }
  }
  for (const int64_t size : rows.sizes) problem.rows *= size;
  // Kernels of element ops count elements in 32 bits if there is more than one row.
  const bool many = !by_row && problem.rows > 1 && logits.numel() > kMaxLogitsRows;
  call.copy = many || rows.sizes.size() > size_t{kLogitsDims};
  if (call.copy && !by_row) {
    problem.columns *= problem.rows;
    problem.rows = 1;
    rows = Dims();
  } else if (call.copy) {
    rows.sizes = {problem.rows};
    rows.strides = {problem.columns};
  }
  if (call.copy) problem.column_stride = 1;
  if (!rows.sizes.empty()) {
    problem.dims = static_cast<int>(rows.sizes.size());
    std::copy(rows.sizes.begin(), rows.sizes.end(), problem.sizes.begin());
    std::copy(rows.strides.begin(), rows.strides.end(), problem.strides.begin());
  }
  problem.vector_aligned = is_vector_aligned(problem, call.copy ? 0 : logits.storage_offset());
  return call;
}

}  // namespace fattn
