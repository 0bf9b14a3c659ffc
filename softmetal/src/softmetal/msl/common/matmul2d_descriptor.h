// <MetalPerformancePrimitives/MPPTensorOpsMatMul2d.h>: the descriptor of a product.
#pragma once
#include "tensor.h"

namespace softmetal {
// Encodes a descriptor as a number, the template argument of matmul2d: in C++17, the base of MSL 4, a class
// cannot be one.
struct DescriptorNumber {
  unsigned long number;
};
}  // namespace softmetal

namespace mpp {
namespace tensor_ops {
template <class T>
constexpr T dynamic_length_v = metal::numeric_limits<T>::max();

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;  // k: 0 if it is dynamic
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;

  constexpr matmul2d_descriptor(int m, int n, int k = int(metal::dynamic_extent), bool transpose_left = false,
                                bool transpose_right = false, bool relaxed_precision = false,
                                mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k <= 0 || k == dynamic_length_v<int> ? 0 : k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}

  constexpr matmul2d_descriptor(::softmetal::DescriptorNumber d)
      : m(d.number & 0xffff),
        n(d.number >> 16 & 0xffff),
        k(d.number >> 32 & 0xffff),
        transpose_left(d.number >> 48 & 1),
        transpose_right(d.number >> 49 & 1),
        relaxed_precision(d.number >> 50 & 1),
        matmul_mode(mode(d.number >> 51 & 1)) {}
  constexpr operator unsigned long() const {
    return (unsigned long)m | (unsigned long)n << 16 | (unsigned long)k << 32 |
           (unsigned long)transpose_left << 48 | (unsigned long)transpose_right << 49 |
           (unsigned long)relaxed_precision << 50 | (unsigned long)matmul_mode << 51;
  }
};

enum class reduction_operation { sum, max, min };
template <class T>
struct reduction_operation_identity {
  static constexpr T sum_identity = T(0);
  static constexpr T max_identity = metal::numeric_limits<T>::lowest();
  static constexpr T min_identity = metal::numeric_limits<T>::max();
};
}  // namespace tensor_ops
}  // namespace mpp

namespace softmetal {
// Whether a product of A and B may be a C: the specification's tables 7.3 and 7.4.
template <class A, class B, class C>
constexpr bool has_product() {
  constexpr bool a_is_byte = sizeof(A) == 1, b_is_byte = sizeof(B) == 1;
  if (a_is_byte && b_is_byte) return metal::is_same_v<C, int>;
  if (metal::is_same_v<C, float>) return true;
  if (metal::is_same_v<A, float> || metal::is_same_v<B, float>) return false;
  if (a_is_byte) return metal::is_same_v<C, B>;
  if (b_is_byte) return metal::is_same_v<C, A>;
  return metal::is_same_v<C, A> || metal::is_same_v<C, B>;
}
}  // namespace softmetal
