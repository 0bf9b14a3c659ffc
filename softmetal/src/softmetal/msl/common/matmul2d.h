// <MetalPerformancePrimitives/MPPTensorOpsMatMul2d.h>: mpp::tensor_ops::matmul2d. Its refusals are Apple's.
//
// The includer defines cooperative tensors, TensorLayout, have_same_elements and multiply_tensors.
#pragma once
#include "line.h"
#include "matmul2d_descriptor.h"

namespace softmetal {
// Which product a layout belongs to.
template <unsigned long descriptor, class Left, class Right>
struct ProductOf {};
template <class T>
using without_qualifiers = metal::remove_cv_t<metal::remove_reference_t<T>>;

template <class Scope>
struct ScopeThreads;
template <size_t N>
struct ScopeThreads<metal::execution_threads<N>> : metal::integral_constant<int, int(N)> {};
template <size_t N>
struct ScopeThreads<metal::execution_simdgroups<N>>
    : metal::integral_constant<int, int(N) * SOFTMETAL_SIMD_WIDTH> {};
}  // namespace softmetal

namespace mpp {
namespace tensor_ops {
template <unsigned long number, class Scope, class... Args>
class matmul2d {
  static constexpr matmul2d_descriptor d{::softmetal::DescriptorNumber{number}};
  static constexpr int threads = ::softmetal::ScopeThreads<Scope>::value;
  static constexpr bool is_one_simdgroup = metal::is_same_v<Scope, metal::execution_simdgroup>;
  template <class Left, class Right>
  using product_of = ::softmetal::ProductOf<number, ::softmetal::without_qualifiers<Left>,
                                            ::softmetal::without_qualifiers<Right>>;
  template <uint32_t role, int rows, int columns, class Left, class Right>
  using layout = ::softmetal::TensorLayout<role, rows, columns, threads, product_of<Left, Right>>;
  template <class T, uint32_t role, class Left, class Right>
  using reduction =
      metal::cooperative_tensor<T, metal::dextents<int, 1>, layout<role, d.m, d.n, Left, Right>>;

  template <class A, class B, class C>
  static constexpr void check_input() {
    static_assert(is_one_simdgroup, "Input cooperative tensors require a single SIMD group");
    static_assert(d.k != 0, "Inner dimension cannot be dynamic");
    static_assert(::softmetal::has_product<A, B, C>(), "unsupported data type");
  }
  template <class A, class B, class C>
  static constexpr void check_left() {
    check_input<A, B, C>();
    static_assert(d.m == 16 || d.m == 32, "M must be 16 or 32 for cooperative tensor inputs");
  }
  template <class A, class B, class C>
  static constexpr void check_right() {
    check_input<A, B, C>();
    static_assert(d.n == 16 || d.n == 32, "N must be 16 or 32 for cooperative tensor inputs");
  }

 public:
  static constexpr matmul2d_descriptor descriptor = d;
  using scope = Scope;

  template <class A, class B, class C, class Index = int>
  using cooperative_tensor_left_input_t = metal::cooperative_tensor<
      A, metal::dextents<Index, 2>,
      layout<d.transpose_left ? SOFTMETAL_TENSOR_LEFT_TRANSPOSED : SOFTMETAL_TENSOR_LEFT,
             d.transpose_left ? d.k : d.m, d.transpose_left ? d.m : d.k, A, B>>;
  template <class A, class B, class C, class Index = int>
  using cooperative_tensor_right_input_t = metal::cooperative_tensor<
      B, metal::dextents<Index, 2>,
      layout<d.transpose_right ? SOFTMETAL_TENSOR_RIGHT_TRANSPOSED : SOFTMETAL_TENSOR_RIGHT,
             d.transpose_right ? d.n : d.k, d.transpose_right ? d.k : d.n, A, B>>;
  template <class Left, class Right, class C, class Index = int>
  using cooperative_tensor_destination_t =
      metal::cooperative_tensor<C, metal::dextents<Index, 2>,
                                layout<SOFTMETAL_TENSOR_DESTINATION, d.m, d.n, Left, Right>>;

  template <class A, class B, class C, class Index = int>
  SOFTMETAL_INLINE auto get_left_input_cooperative_tensor() const {
    check_left<A, B, C>();
    return cooperative_tensor_left_input_t<A, B, C, Index>();
  }
  template <class A, class B, class C, class Index = int>
  SOFTMETAL_INLINE auto get_right_input_cooperative_tensor() const {
    check_right<A, B, C>();
    return cooperative_tensor_right_input_t<A, B, C, Index>();
  }
  // The elements of another cooperative tensor, whose layout must be compatible.
  template <class A, class B, class C, class Index = int, class T, class X, class L>
  SOFTMETAL_INLINE auto get_left_input_cooperative_tensor(
      const metal::cooperative_tensor<T, X, L>& source) const {
    static_assert(metal::is_same_v<A, T>, "the source's element type must be the input's");
    check_left<A, B, C>();
    return cooperative_tensor_left_input_t<A, B, C, Index>(::softmetal::SameElements(), source);
  }
  template <class A, class B, class C, class Index = int, class T, class X, class L>
  SOFTMETAL_INLINE auto get_right_input_cooperative_tensor(
      const metal::cooperative_tensor<T, X, L>& source) const {
    static_assert(metal::is_same_v<B, T>, "the source's element type must be the input's");
    check_right<A, B, C>();
    return cooperative_tensor_right_input_t<A, B, C, Index>(::softmetal::SameElements(), source);
  }
  template <class A, class B, class C, class T, class X, class L>
  SOFTMETAL_INLINE bool is_compatible_as_left_input(const metal::cooperative_tensor<T, X, L>&) const {
    using Input = typename cooperative_tensor_left_input_t<A, B, C>::layout;
    return metal::is_same_v<A, T> && ::softmetal::have_same_elements<L, Input>();
  }
  template <class A, class B, class C, class T, class X, class L>
  SOFTMETAL_INLINE bool is_compatible_as_right_input(const metal::cooperative_tensor<T, X, L>&) const {
    using Input = typename cooperative_tensor_right_input_t<A, B, C>::layout;
    return metal::is_same_v<B, T> && ::softmetal::have_same_elements<L, Input>();
  }

  template <class Left, class Right, class C, class Index = int>
  SOFTMETAL_INLINE auto get_destination_cooperative_tensor() const {
    return cooperative_tensor_destination_t<Left, Right, C, Index>();
  }
  template <class Left, class Right, class C, class Index = int>
  SOFTMETAL_INLINE auto get_row_reduction_destination_cooperative_tensor() const {
    static_assert(is_one_simdgroup, "reductions require a single SIMD group");
    return reduction<C, SOFTMETAL_TENSOR_ROW_REDUCTION, Left, Right>();
  }
  template <class Left, class Right, class C, class Index = int>
  SOFTMETAL_INLINE auto get_column_reduction_destination_cooperative_tensor() const {
    static_assert(is_one_simdgroup, "reductions require a single SIMD group");
    return reduction<C, SOFTMETAL_TENSOR_COLUMN_REDUCTION, Left, Right>();
  }

  template <class Left, class Right, class Out>
  SOFTMETAL_INLINE void run(Left& left, Right& right, Out& out, SOFTMETAL_LINE) const {
    static_assert(!metal::is_const_v<Left> && !metal::is_const_v<Right> && !metal::is_const_v<Out>,
                  "the operands of run must not be const");
    static_assert(d.m % 16 == 0 || d.n % 16 == 0, "At least one of M or N must be a multiple of 16");
    static_assert(::softmetal::has_product<typename Left::value_type, typename Right::value_type,
                                           typename Out::value_type>(),
                  "unsupported data type");
    if constexpr (::softmetal::is_cooperative_v<Left> && ::softmetal::is_cooperative_v<Right>)
      static_assert(d.m == 32 || d.n == 32 || d.k == 32,
                    "at least one of M, N, K must be 32 if both inputs are cooperative tensors");
    ::softmetal::multiply_tensors<number, threads>(left, right, out, line);
  }
};
}  // namespace tensor_ops
}  // namespace mpp
