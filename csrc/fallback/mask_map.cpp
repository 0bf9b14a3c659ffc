// mask_map in plain PyTorch.
#include <limits>

#include <ATen/ops/constant_pad_nd.h>

#include "fallback.h"

namespace fattn {
namespace {

using at::Tensor;

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

Tensor run_in_torch(const MaskMapCall& call) {
  const MaskMapProblem& p = call.problem;
  const Tensor mask = call.mask.view({p.batch, p.heads, p.rows, p.keys});
  const bool is_bool = p.dtype == DType::kBool;
  const Tensor hidden = is_bool ? mask.logical_not() : mask.eq(-std::numeric_limits<double>::infinity());
  const Tensor whole = is_bool ? mask : mask.eq(0.0);
  const Tensor mixed = hidden_fragments(hidden, p).mul(1 << kCellKindBits).add(int{kCellMixed});
  const Tensor map = mixed.masked_fill(all_rows_of_cells(whole, p, true).all(4), int{kCellWhole});
  return map.masked_fill(all_rows_of_cells(hidden, p, true).all(4), int{kCellHidden});
}

}  // namespace fattn
