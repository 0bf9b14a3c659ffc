// Mathematical functions. All are templates: an unqualified call prefers CUDA's equivalent global function
// for the same arguments.
#pragma once

#include "traits.h"

namespace metal {

#define SOFTMETAL_UNARY(name, function)                                            \
  template <softmetal::Scalar T>                                                   \
  SOFTMETAL_INLINE T name(T x) {                                                   \
    return T(function(float(x)));                                                  \
  }                                                                                \
  template <typename T, int N>                                                     \
  SOFTMETAL_INLINE vec<T, N> name(vec<T, N> x) {                                   \
    _Pragma("unroll") for (int i = 0; i < N; ++i) x[i] = T(function(float(x[i]))); \
    return x;                                                                      \
  }
#define SOFTMETAL_FLOAT_FUNCTIONS  \
  SOFTMETAL_UNARY(exp, ::expf)     \
  SOFTMETAL_UNARY(exp2, ::exp2f)   \
  SOFTMETAL_UNARY(log, ::logf)     \
  SOFTMETAL_UNARY(log2, ::log2f)   \
  SOFTMETAL_UNARY(log10, ::log10f) \
  SOFTMETAL_UNARY(sin, ::sinf)     \
  SOFTMETAL_UNARY(cos, ::cosf)     \
  SOFTMETAL_UNARY(tanh, ::tanhf)   \
  SOFTMETAL_UNARY(sqrt, ::sqrtf)   \
  SOFTMETAL_UNARY(rsqrt, ::rsqrtf) \
  SOFTMETAL_UNARY(floor, ::floorf) \
  SOFTMETAL_UNARY(ceil, ::ceilf)   \
  SOFTMETAL_UNARY(rint, ::rintf)   \
  SOFTMETAL_UNARY(round, ::roundf) \
  SOFTMETAL_UNARY(trunc, ::truncf) \
  SOFTMETAL_UNARY(fabs, ::fabsf)
SOFTMETAL_FLOAT_FUNCTIONS

namespace precise {
SOFTMETAL_FLOAT_FUNCTIONS
}

// One hardware instruction each, like Metal's fast functions.
namespace fast {
template <softmetal::Scalar T>
SOFTMETAL_INLINE T exp2(T x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(float(x)));
  return T(y);
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE T exp(T x) {
  return T(exp2(float(x) * 1.44269504088896340736f));
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE T log2(T x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(float(x)));
  return T(y);
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE T log(T x) {
  return T(log2(float(x)) * 0.69314718055994530942f);
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE T divide(T a, T b) {
  return T(__fdividef(float(a), float(b)));
}
SOFTMETAL_UNARY(tanh, ::tanhf)
SOFTMETAL_UNARY(rsqrt, ::rsqrtf)
}  // namespace fast
#undef SOFTMETAL_FLOAT_FUNCTIONS
#undef SOFTMETAL_UNARY

template <softmetal::Scalar T>
SOFTMETAL_INLINE constexpr bool isnan(T x) {
  return (softmetal::float_bits(float(x)) & 0x7fffffffu) > 0x7f800000u;
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE constexpr bool isinf(T x) {
  return (softmetal::float_bits(float(x)) & 0x7fffffffu) == 0x7f800000u;
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE constexpr bool isfinite(T x) {
  return (softmetal::float_bits(float(x)) & 0x7fffffffu) < 0x7f800000u;
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE constexpr bool isunordered(T a, T b) {
  return isnan(a) || isnan(b);
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE T atan2(T y, T x) {
  return T(::atan2f(float(y), float(x)));
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE T copysign(T magnitude, T sign) {
  return T(::copysignf(float(magnitude), float(sign)));
}

template <typename T>
SOFTMETAL_INLINE constexpr T max(T a, T b) {
  if constexpr (is_floating_point_v<T>) {
    return T(__builtin_fmaxf(float(a), float(b)));
  } else {
    return a < b ? b : a;
  }
}
template <typename T>
SOFTMETAL_INLINE constexpr T min(T a, T b) {
  if constexpr (is_floating_point_v<T>) {
    return T(__builtin_fminf(float(a), float(b)));
  } else {
    return b < a ? b : a;
  }
}
template <softmetal::Short T>
SOFTMETAL_INLINE constexpr T fmax(T a, T b) {
  return metal::max(a, b);
}
template <softmetal::Short T>
SOFTMETAL_INLINE constexpr T fmin(T a, T b) {
  return metal::min(a, b);
}
template <typename T>
SOFTMETAL_INLINE constexpr T clamp(T x, T low, T high) {
  return metal::min(metal::max(x, low), high);
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE constexpr T abs(T x) {
  return x < T(0) ? T(-x) : x;
}
template <softmetal::Scalar T>
SOFTMETAL_INLINE T fma(T a, T b, T c) {
  return T(__builtin_fmaf(float(a), float(b), float(c)));
}
template <typename T, int N>
SOFTMETAL_INLINE vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] = metal::fma(a[i], b[i], c[i]);
  return a;
}
SOFTMETAL_INLINE vec<half, 2> fma(vec<half, 2> a, vec<half, 2> b, vec<half, 2> c) {
  uint result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;"
      : "=r"(result)
      : "r"(__builtin_bit_cast(uint, a)), "r"(__builtin_bit_cast(uint, b)), "r"(__builtin_bit_cast(uint, c)));
  return __builtin_bit_cast(vec<half, 2>, result);
}
template <typename T, typename C>
SOFTMETAL_INLINE constexpr T select(T when_false, T when_true, C condition) {
  return condition ? when_true : when_false;
}

SOFTMETAL_INLINE uint popcount(uint x) { return __popc(x); }
SOFTMETAL_INLINE uint clz(uint x) { return __clz(x); }
SOFTMETAL_INLINE uint ctz(uint x) { return x ? __ffs(x) - 1 : 32; }

}  // namespace metal
