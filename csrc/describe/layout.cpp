#include "layout.h"

#include "calls.h"

namespace fattn {
namespace {

using at::Tensor;

constexpr int64_t kVectorBytes = 16;               // per load of the kernels
constexpr int64_t kMaxVectors = int64_t{1} << 32;  // of an operand with vector loads: 64 GiB

}  // namespace

bool has_contiguous_rows(const Tensor& operand) { return operand.stride(-1) == 1; }

Layout layout_of(const Tensor& operand) {
  const auto sizes = operand.sizes();
  const int64_t vector = kVectorBytes / operand.element_size();
  const bool is_copied = !has_contiguous_rows(operand);
  Layout layout{{}, is_copied || operand.storage_offset() % vector == 0};
  int64_t step = sizes.back();  // stride in a copy
  int64_t last = 0;             // element of the last row
  for (int64_t dim = operand.dim() - 2, place = 2; dim >= 0; --dim, --place) {
    const int64_t stride = is_copied ? step : operand.stride(dim);
    layout.strides[place] = stride;
    layout.vector_aligned = layout.vector_aligned && (sizes[dim] <= 1 || stride % vector == 0);
    step *= sizes[dim];
    last += (sizes[dim] - 1) * stride;
  }
  // 32 bits must hold the number of a chunk.
  layout.vector_aligned = layout.vector_aligned && (last + sizes.back()) / vector <= kMaxVectors;
  return layout;
}

Tensor with_contiguous_rows(const Tensor& operand) {
  return has_contiguous_rows(operand) ? operand : operand.contiguous();
}

}  // namespace fattn
