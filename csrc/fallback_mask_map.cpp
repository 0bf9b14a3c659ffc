// mask_map in plain PyTorch.
#include <limits>

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/where.h>

#include "fallback.h"

namespace fattn {
namespace {

using at::Tensor;

// Whether all entries of each cell are set; entries that there are not count as set.
Tensor all_of_cells(const Tensor& entries, const MaskMapProblem& p) {
  const auto missing = [](int64_t length, int64_t cell) { return (cell - length % cell) % cell; };
  const Tensor padded = at::constant_pad_nd(
      entries.to(at::kByte), {0, missing(p.keys, kCellKeys), 0, missing(p.rows, kCellRows)}, 1);
  return padded.unflatten(3, {-1, kCellKeys}).unflatten(2, {-1, kCellRows}).eq(1).all(5).all(3);
}

}  // namespace

Tensor run_in_torch(const MaskMapCall& call) {
  const MaskMapProblem& p = call.problem;
  const Tensor mask = call.mask.view({p.batch, p.heads, p.rows, p.keys});
  const bool is_bool = p.dtype == DType::kBool;
  const Tensor hidden = is_bool ? mask.logical_not() : mask.eq(-std::numeric_limits<double>::infinity());
  const Tensor whole = is_bool ? mask : mask.eq(0.0);
  const Tensor map = at::where(all_of_cells(whole, p), int{kCellWhole}, int{kCellMixed});
  return map.masked_fill(all_of_cells(hidden, p), int{kCellHidden}).to(at::kByte);
}

}  // namespace fattn
