// mpp::tensor_ops: products of tensors by one simdgroup, and reductions of rows. Metal does not specify the
// layout of cooperative tensors. This is the published layout of an M5 (tensor_fragments.h), the only one
// under which kernels that name lanes are right.
#pragma once

#include "tensor_product.h"
// Needs the names of tensor_product.h.
#include "../../msl/common/matmul2d.h"

namespace mpp::tensor_ops {

// Each row's element is held by the four lanes that hold the row.
template <typename T, typename X, typename Y, typename Source, typename Rows>
SOFTMETAL_INLINE void reduce_rows(metal::cooperative_tensor<T, X, Source>& source,
                                  metal::cooperative_tensor<T, Y, Rows>& rows,
                                  reduction_operation operation = reduction_operation::sum,
                                  T identity = T(0)) {
  static_assert(std::is_same_v<typename Source::Operation, typename Rows::Operation>,
                "source and reduction belong to different operations");
  const auto combined = [operation](T a, T b) {
    return operation == reduction_operation::sum   ? T(a + b)
           : operation == reduction_operation::max ? metal::max(a, b)
                                                   : metal::min(a, b);
  };
#pragma unroll
  for (int slot = 0; slot < Rows::capacity; ++slot) rows.elements[slot] = identity;
#pragma unroll
  for (int i = 0; i < Source::capacity; ++i) {
    T& row = rows.elements[Source::row_slot(i)];
    row = combined(row, source.elements[i]);
  }
#pragma unroll
  for (int slot = 0; slot < Rows::capacity; ++slot) {
    T& row = rows.elements[slot];
#pragma unroll
    for (uint mask = 1; mask < 4; mask *= 2) {
      row = combined(row, softmetal::shuffled(row, softmetal::ShuffleXor{mask}));
    }
  }
}

// Whether map_iterator finds the row of every element.
template <typename T, typename U, typename X, typename Y, typename Source, typename Rows>
SOFTMETAL_INLINE constexpr bool is_iterator_compatible(const metal::cooperative_tensor<T, X, Source>&,
                                                       const metal::cooperative_tensor<U, Y, Rows>&) {
  return std::is_same_v<T, U> && Source::rows == Rows::rows;
}

}  // namespace mpp::tensor_ops
