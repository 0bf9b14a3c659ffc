// mpp::tensor_ops: products of tensors by one simdgroup, and reductions of rows. Metal does not specify the
// layout of cooperative tensors. This is the published layout of an M5 (tensor_fragments.h), the only one
// under which kernels that name lanes are right.
#pragma once

#include "tensor_product.h"

namespace mpp::tensor_ops {

template <typename T>
constexpr T dynamic_length_v = metal::numeric_limits<T>::max();

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;

  SOFTMETAL_INLINE constexpr matmul2d_descriptor(int rows, int columns,
                                                 int inner = int(metal::dynamic_extent),
                                                 bool transposed_left = false, bool transposed_right = false,
                                                 bool relaxed = false, mode how = mode::multiply)
      : m(rows),
        n(columns),
        k(inner),
        transpose_left(transposed_left),
        transpose_right(transposed_right),
        relaxed_precision(relaxed),
        matmul_mode(how) {}
  SOFTMETAL_INLINE constexpr bool is_dynamic() const { return k <= 0 || k == 0x7fffffff; }
  SOFTMETAL_INLINE constexpr bool accumulates() const { return matmul_mode == mode::multiply_accumulate; }
};

enum class reduction_operation { sum, max, min };

template <typename T>
struct reduction_operation_identity {
  static constexpr T sum_identity = T(0);
  static constexpr T max_identity = metal::numeric_limits<T>::lowest();
  static constexpr T min_identity = metal::numeric_limits<T>::max();
};

template <matmul2d_descriptor D, typename Scope, typename... Arguments>
class matmul2d {
  static_assert(std::is_same_v<Scope, metal::execution_simdgroup>,
                "only execution_simdgroup is supported here");
  typedef metal::dextents<int, 2> Extents;
  template <typename L, typename R>
  struct Operation;  // a tag that a destination's layout and a reduction share
  template <int rows, int columns, typename T, typename L, typename R>
  using Tile = metal::cooperative_tensor<
      T, Extents,
      softmetal::TileLayout<rows, columns, Operation<std::remove_cvref_t<L>, std::remove_cvref_t<R>>>>;

 public:
  static constexpr matmul2d_descriptor descriptor = D;
  using scope = Scope;

  template <typename A, typename B, typename C, typename Index = int>
  using cooperative_tensor_left_input_t =
      Tile<D.transpose_left ? D.k : D.m, D.transpose_left ? D.m : D.k, A, A, B>;
  template <typename A, typename B, typename C, typename Index = int>
  using cooperative_tensor_right_input_t =
      Tile<D.transpose_right ? D.n : D.k, D.transpose_right ? D.k : D.n, B, A, B>;
  template <typename L, typename R, typename C, typename Index = int>
  using cooperative_tensor_destination_t = Tile<D.m, D.n, C, L, R>;
  template <typename L, typename R, typename C, typename Index = int>
  using cooperative_tensor_row_reduction_destination_t = metal::cooperative_tensor<
      C, metal::dextents<int, 1>,
      softmetal::RowLayout<D.m, Operation<std::remove_cvref_t<L>, std::remove_cvref_t<R>>>>;

  template <typename A, typename B, typename C, typename Index = int>
  SOFTMETAL_INLINE auto get_left_input_cooperative_tensor() const {
    return cooperative_tensor_left_input_t<A, B, C, Index>();
  }
  template <typename A, typename B, typename C, typename Index = int>
  SOFTMETAL_INLINE auto get_right_input_cooperative_tensor() const {
    return cooperative_tensor_right_input_t<A, B, C, Index>();
  }
  template <typename A, typename B, typename C, typename Index = int, typename T, typename X, typename Layout>
  SOFTMETAL_INLINE auto get_left_input_cooperative_tensor(
      const metal::cooperative_tensor<T, X, Layout>& source) const {
    typedef cooperative_tensor_left_input_t<A, B, C, Index> Input;
    static_assert(is_same_tile<Input, T, Layout>, "the source is not the tile that the product takes");
    return Input(softmetal::SameElements(), source);
  }
  template <typename A, typename B, typename C, typename T, typename X, typename Layout>
  SOFTMETAL_INLINE constexpr bool is_compatible_as_left_input(
      const metal::cooperative_tensor<T, X, Layout>&) const {
    return is_same_tile<cooperative_tensor_left_input_t<A, B, C>, T, Layout>;
  }
  template <typename L, typename R, typename C, typename Index = int>
  SOFTMETAL_INLINE auto get_destination_cooperative_tensor() const {
    return cooperative_tensor_destination_t<L, R, C, Index>();
  }
  template <typename L, typename R, typename C, typename Index = int>
  SOFTMETAL_INLINE auto get_row_reduction_destination_cooperative_tensor() const {
    return cooperative_tensor_row_reduction_destination_t<L, R, C, Index>();
  }

  template <typename L, typename R, typename O>
  SOFTMETAL_INLINE void run(L& left, R& right, O& out) const {
    softmetal::MatrixProduct<D, L, R, O>::run(left, right, out);
  }

 private:
  template <typename Input, typename T, typename Layout>
  static constexpr bool is_same_tile =
      std::is_same_v<typename Input::value_type, T> && Input::layout::rows == Layout::rows &&
      Input::layout::columns == Layout::columns;
};

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
