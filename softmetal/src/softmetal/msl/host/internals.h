// Private names of Apple's library that MLX's kernels call (mlx/backend/metal/kernels/bf16_math.h).
#pragma once
#pragma clang system_header
#include "simdgroup.h"

constexpr bool __METAL_FAST_MATH__ = true;
constexpr bool __METAL_PRECISE_MATH__ = false;
constexpr bool __METAL_MAYBE_FAST_MATH__ = SOFTMETAL_FAST_FUNCTIONS;

// The types that simdgroup operations take, and the elements of a type: candle's and mistral.rs's kernels use
// these names.
namespace metal {
template <class T>
struct __is_valid_simdgroup_type
    : bool_constant<is_arithmetic_v<softmetal::element_of<T>> && sizeof(softmetal::element_of<T>) <= 4> {};
template <class... T>
struct _disjunction : false_type {};
template <class First, class... Rest>
struct _disjunction<First, Rest...> : bool_constant<First::value || _disjunction<Rest...>::value> {};
template <class T>
struct vec_elements : integral_constant<int, softmetal::vector_size<T>> {};
}  // namespace metal

// The last argument chooses between fast and precise.
#define SOFTMETAL_UNARY_INTERNAL(NAME)                               \
  SOFTMETAL_INLINE float __metal_##NAME(float x, bool is_fast) {     \
    return is_fast ? metal::fast::NAME(x) : metal::precise::NAME(x); \
  }
#define SOFTMETAL_BINARY_INTERNAL(NAME)                                    \
  SOFTMETAL_INLINE float __metal_##NAME(float x, float y, bool is_fast) {  \
    return is_fast ? metal::fast::NAME(x, y) : metal::precise::NAME(x, y); \
  }
#define SOFTMETAL_TERNARY_INTERNAL(NAME)                                           \
  SOFTMETAL_INLINE float __metal_##NAME(float x, float y, float z, bool is_fast) { \
    return is_fast ? metal::fast::NAME(x, y, z) : metal::precise::NAME(x, y, z);   \
  }
SOFTMETAL_UNARY_INTERNAL(acos)
SOFTMETAL_UNARY_INTERNAL(acosh)
SOFTMETAL_UNARY_INTERNAL(asin)
SOFTMETAL_UNARY_INTERNAL(asinh)
SOFTMETAL_UNARY_INTERNAL(atan)
SOFTMETAL_UNARY_INTERNAL(atanh)
SOFTMETAL_UNARY_INTERNAL(ceil)
SOFTMETAL_UNARY_INTERNAL(cos)
SOFTMETAL_UNARY_INTERNAL(cosh)
SOFTMETAL_UNARY_INTERNAL(cospi)
SOFTMETAL_UNARY_INTERNAL(exp)
SOFTMETAL_UNARY_INTERNAL(exp10)
SOFTMETAL_UNARY_INTERNAL(exp2)
SOFTMETAL_UNARY_INTERNAL(fabs)
SOFTMETAL_UNARY_INTERNAL(floor)
SOFTMETAL_UNARY_INTERNAL(fract)
SOFTMETAL_UNARY_INTERNAL(log)
SOFTMETAL_UNARY_INTERNAL(log10)
SOFTMETAL_UNARY_INTERNAL(log2)
SOFTMETAL_UNARY_INTERNAL(rint)
SOFTMETAL_UNARY_INTERNAL(round)
SOFTMETAL_UNARY_INTERNAL(rsqrt)
SOFTMETAL_UNARY_INTERNAL(sin)
SOFTMETAL_UNARY_INTERNAL(sinh)
SOFTMETAL_UNARY_INTERNAL(sinpi)
SOFTMETAL_UNARY_INTERNAL(sqrt)
SOFTMETAL_UNARY_INTERNAL(tan)
SOFTMETAL_UNARY_INTERNAL(tanh)
SOFTMETAL_UNARY_INTERNAL(tanpi)
SOFTMETAL_UNARY_INTERNAL(trunc)
SOFTMETAL_BINARY_INTERNAL(atan2)
SOFTMETAL_BINARY_INTERNAL(divide)
SOFTMETAL_BINARY_INTERNAL(fmax)
SOFTMETAL_BINARY_INTERNAL(fmin)
SOFTMETAL_BINARY_INTERNAL(fmod)
SOFTMETAL_BINARY_INTERNAL(pow)
SOFTMETAL_BINARY_INTERNAL(powr)
SOFTMETAL_TERNARY_INTERNAL(fmax3)
SOFTMETAL_TERNARY_INTERNAL(fmin3)
SOFTMETAL_TERNARY_INTERNAL(fmedian3)
#undef SOFTMETAL_UNARY_INTERNAL
#undef SOFTMETAL_BINARY_INTERNAL
#undef SOFTMETAL_TERNARY_INTERNAL
SOFTMETAL_INLINE float __metal_fma(float x, float y, float z) { return metal::fma(x, y, z); }
SOFTMETAL_INLINE float __metal_nextafter(float x, float y) { return metal::nextafter(x, y); }
SOFTMETAL_INLINE float __metal_ldexp(float x, int exponent, bool) { return metal::ldexp(x, exponent); }
SOFTMETAL_INLINE float __metal_frexp(float x, int* exponent) { return metal::frexp(x, *exponent); }
SOFTMETAL_INLINE float __metal_simd_xor(float x) { return as_type<float>(metal::simd_xor(as_type<uint>(x))); }
SOFTMETAL_INLINE ushort __metal_get_simdgroup_size(ushort) { return SOFTMETAL_SIMD_WIDTH; }
SOFTMETAL_INLINE ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return softmetal_current_lane()->lane;
}

#define SOFTMETAL_SIMD_INTERNAL(NAME)                         \
  template <class... A>                                       \
  SOFTMETAL_INLINE auto __metal_simd_##NAME(A... arguments) { \
    return metal::simd_##NAME(arguments...);                  \
  }
SOFTMETAL_SIMD_INTERNAL(sum)
SOFTMETAL_SIMD_INTERNAL(product)
SOFTMETAL_SIMD_INTERNAL(max)
SOFTMETAL_SIMD_INTERNAL(min)
SOFTMETAL_SIMD_INTERNAL(prefix_inclusive_sum)
SOFTMETAL_SIMD_INTERNAL(prefix_exclusive_sum)
SOFTMETAL_SIMD_INTERNAL(prefix_inclusive_product)
SOFTMETAL_SIMD_INTERNAL(prefix_exclusive_product)
SOFTMETAL_SIMD_INTERNAL(broadcast)
SOFTMETAL_SIMD_INTERNAL(shuffle)
SOFTMETAL_SIMD_INTERNAL(shuffle_xor)
SOFTMETAL_SIMD_INTERNAL(shuffle_up)
SOFTMETAL_SIMD_INTERNAL(shuffle_down)
SOFTMETAL_SIMD_INTERNAL(shuffle_rotate_up)
SOFTMETAL_SIMD_INTERNAL(shuffle_rotate_down)
SOFTMETAL_SIMD_INTERNAL(shuffle_and_fill_up)
SOFTMETAL_SIMD_INTERNAL(shuffle_and_fill_down)
#undef SOFTMETAL_SIMD_INTERNAL
