// <metal_math>, and <metal_common> on floating-point types. Namespaces fast and precise hold the variants of
// accuracy.h; namespace metal holds the variants that SOFTMETAL_FAST_FUNCTIONS selects by compile options.
//
// bfloat versions are templates that return float. Apple has none (a bfloat argument becomes a float), and
// programs define their own in namespace metal.
#pragma once
#pragma clang system_header
#include "accuracy.h"

namespace softmetal {
template <class T>
using if_bfloat = enable_if_t<is_same_v<T, bfloat>, int>;

SOFTMETAL_INLINE float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f; }
SOFTMETAL_INLINE float saturate(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f); }
SOFTMETAL_INLINE float fract(float x) {
  return x != x ? x : __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f);
}
SOFTMETAL_INLINE float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
SOFTMETAL_INLINE float mix(float x, float y, float a) { return x + (y - x) * a; }
SOFTMETAL_INLINE float smoothstep(float low, float high, float x) {
  const float t = saturate((x - low) / (high - low));
  return t * t * (3.0f - 2.0f * t);
}
SOFTMETAL_INLINE float min3(float a, float b, float c) { return __builtin_fminf(__builtin_fminf(a, b), c); }
SOFTMETAL_INLINE float max3(float a, float b, float c) { return __builtin_fmaxf(__builtin_fmaxf(a, b), c); }
SOFTMETAL_INLINE float median3(float a, float b, float c) {
  return __builtin_fmaxf(__builtin_fminf(a, b), __builtin_fminf(__builtin_fmaxf(a, b), c));
}
SOFTMETAL_INLINE float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// Rounded once: the double is exact whenever it matters.
SOFTMETAL_INLINE half fma_of(half a, half b, half c) {
  return (half)__builtin_fma((double)a, (double)b, (double)c);
}
SOFTMETAL_INLINE half half_fract(half x) {
  const half r = (half)fract((float)x);
  return r == (half)1.0f ? (half)0x1.ffcp-1f : r;
}
namespace precise {
SOFTMETAL_INLINE float counted_exp(float x) { return softmetal_count_exp(), exp(x); }
SOFTMETAL_INLINE float counted_exp2(float x) { return softmetal_count_exp(), exp2(x); }
SOFTMETAL_INLINE float counted_exp10(float x) { return softmetal_count_exp(), exp10(x); }
}  // namespace precise
namespace fast {
SOFTMETAL_INLINE float counted_exp(float x) { return softmetal_count_exp(), exp(x); }
SOFTMETAL_INLINE float counted_exp2(float x) { return softmetal_count_exp(), exp2(x); }
SOFTMETAL_INLINE float counted_exp10(float x) { return softmetal_count_exp(), exp10(x); }
}  // namespace fast
}  // namespace softmetal

// FLOAT is the function of a float. A half is widened, goes through WIDE, and is rounded by ROUND.
#define SOFTMETAL_UNARY(NAME, FLOAT, WIDE, ROUND)                                           \
  SOFTMETAL_INLINE float NAME(float x) { return FLOAT(x); }                                 \
  SOFTMETAL_INLINE half NAME(half x) { return ROUND(WIDE((float)x)); }                      \
  template <class T, ::softmetal::if_bfloat<T> = 0>                                         \
  SOFTMETAL_INLINE float NAME(T x) {                                                        \
    return FLOAT((float)x);                                                                 \
  }                                                                                         \
  template <class T, int N, ::metal::enable_if_t<::metal::is_floating_point_v<T>, int> = 0> \
  SOFTMETAL_INLINE ::metal::vec<T, N> NAME(::metal::vec<T, N> x) {                          \
    ::metal::vec<T, N> r;                                                                   \
    for (int i = 0; i < N; ++i) r[i] = (T)NAME((T)x[i]);                                    \
    return r;                                                                               \
  }
#define SOFTMETAL_BINARY(NAME, FLOAT, WIDE, ROUND)                                          \
  SOFTMETAL_INLINE float NAME(float x, float y) { return FLOAT(x, y); }                     \
  SOFTMETAL_INLINE half NAME(half x, half y) { return ROUND(WIDE((float)x, (float)y)); }    \
  template <class T, ::softmetal::if_bfloat<T> = 0>                                         \
  SOFTMETAL_INLINE float NAME(T x, T y) {                                                   \
    return FLOAT((float)x, (float)y);                                                       \
  }                                                                                         \
  template <class T, int N, ::metal::enable_if_t<::metal::is_floating_point_v<T>, int> = 0> \
  SOFTMETAL_INLINE ::metal::vec<T, N> NAME(::metal::vec<T, N> x,                            \
                                           ::softmetal::undeduced<::metal::vec<T, N>> y) {  \
    ::metal::vec<T, N> r;                                                                   \
    for (int i = 0; i < N; ++i) r[i] = (T)NAME((T)x[i], (T)y[i]);                           \
    return r;                                                                               \
  }
#define SOFTMETAL_TERNARY(NAME, FLOAT, HALF)                                                \
  SOFTMETAL_INLINE float NAME(float x, float y, float z) { return FLOAT(x, y, z); }         \
  SOFTMETAL_INLINE half NAME(half x, half y, half z) { return (half)HALF(x, y, z); }        \
  template <class T, ::softmetal::if_bfloat<T> = 0>                                         \
  SOFTMETAL_INLINE float NAME(T x, T y, T z) {                                              \
    return FLOAT((float)x, (float)y, (float)z);                                             \
  }                                                                                         \
  template <class T, int N, ::metal::enable_if_t<::metal::is_floating_point_v<T>, int> = 0> \
  SOFTMETAL_INLINE ::metal::vec<T, N> NAME(::metal::vec<T, N> x,                            \
                                           ::softmetal::undeduced<::metal::vec<T, N>> y,    \
                                           ::softmetal::undeduced<::metal::vec<T, N>> z) {  \
    ::metal::vec<T, N> r;                                                                   \
    for (int i = 0; i < N; ++i) r[i] = (T)NAME((T)x[i], (T)y[i], (T)z[i]);                  \
    return r;                                                                               \
  }
#define SOFTMETAL_EXACT(NAME, FLOAT) SOFTMETAL_UNARY(NAME, FLOAT, FLOAT, (half))
#define SOFTMETAL_EXACT2(NAME, FLOAT) SOFTMETAL_BINARY(NAME, FLOAT, FLOAT, (half))
#define SOFTMETAL_EXACT3(NAME, FLOAT) SOFTMETAL_TERNARY(NAME, FLOAT, FLOAT)
#define SOFTMETAL_ROUNDED(VARIANT, NAME, FUNCTION)                                      \
  SOFTMETAL_UNARY(NAME, ::softmetal::VARIANT::FUNCTION, ::softmetal::precise::FUNCTION, \
                  ::softmetal::half_result)
#define SOFTMETAL_ROUNDED2(VARIANT, NAME, FUNCTION)                                      \
  SOFTMETAL_BINARY(NAME, ::softmetal::VARIANT::FUNCTION, ::softmetal::precise::FUNCTION, \
                   ::softmetal::half_result)

// The functions of one variant, fast or precise.
#define SOFTMETAL_MATH(VARIANT)                                                                      \
  SOFTMETAL_ROUNDED(VARIANT, exp, counted_exp)                                                       \
  SOFTMETAL_ROUNDED(VARIANT, exp2, counted_exp2)                                                     \
  SOFTMETAL_ROUNDED(VARIANT, exp10, counted_exp10)                                                   \
  SOFTMETAL_ROUNDED(VARIANT, log, log)                                                               \
  SOFTMETAL_ROUNDED(VARIANT, log2, log2)                                                             \
  SOFTMETAL_ROUNDED(VARIANT, log10, log10)                                                           \
  SOFTMETAL_ROUNDED(VARIANT, sin, sin)                                                               \
  SOFTMETAL_ROUNDED(VARIANT, cos, cos)                                                               \
  SOFTMETAL_ROUNDED(VARIANT, tan, tan)                                                               \
  SOFTMETAL_ROUNDED(VARIANT, sinpi, sinpi)                                                           \
  SOFTMETAL_ROUNDED(VARIANT, cospi, cospi)                                                           \
  SOFTMETAL_ROUNDED(VARIANT, tanpi, tanpi)                                                           \
  SOFTMETAL_ROUNDED(VARIANT, asin, asin)                                                             \
  SOFTMETAL_ROUNDED(VARIANT, acos, acos)                                                             \
  SOFTMETAL_ROUNDED(VARIANT, atan, atan)                                                             \
  SOFTMETAL_ROUNDED(VARIANT, sinh, sinh)                                                             \
  SOFTMETAL_ROUNDED(VARIANT, cosh, cosh)                                                             \
  SOFTMETAL_ROUNDED(VARIANT, tanh, tanh)                                                             \
  SOFTMETAL_ROUNDED(VARIANT, asinh, asinh)                                                           \
  SOFTMETAL_ROUNDED(VARIANT, acosh, acosh)                                                           \
  SOFTMETAL_ROUNDED(VARIANT, atanh, atanh)                                                           \
  SOFTMETAL_ROUNDED2(VARIANT, pow, pow)                                                              \
  SOFTMETAL_ROUNDED2(VARIANT, powr, powr)                                                            \
  SOFTMETAL_ROUNDED2(VARIANT, atan2, atan2)                                                          \
  SOFTMETAL_UNARY(sqrt, ::softmetal::VARIANT::sqrt, ::softmetal::precise::sqrt, (half))              \
  SOFTMETAL_UNARY(rsqrt, ::softmetal::VARIANT::rsqrt, ::softmetal::precise::rsqrt, (half))           \
  SOFTMETAL_BINARY(divide, ::softmetal::VARIANT::divide, ::softmetal::precise::divide, (half))       \
  SOFTMETAL_EXACT(fabs, __builtin_fabsf)                                                             \
  SOFTMETAL_EXACT(abs, __builtin_fabsf)                                                              \
  SOFTMETAL_EXACT(floor, __builtin_floorf)                                                           \
  SOFTMETAL_EXACT(ceil, __builtin_ceilf)                                                             \
  SOFTMETAL_EXACT(rint, __builtin_rintf)                                                             \
  SOFTMETAL_EXACT(round, __builtin_roundf)                                                           \
  SOFTMETAL_EXACT(trunc, __builtin_truncf)                                                           \
  SOFTMETAL_EXACT(sign, ::softmetal::sign)                                                           \
  SOFTMETAL_EXACT(saturate, ::softmetal::saturate)                                                   \
  SOFTMETAL_UNARY(fract, ::softmetal::fract, , ::softmetal::half_fract)                              \
  SOFTMETAL_EXACT2(fmod, __builtin_fmodf)                                                            \
  SOFTMETAL_EXACT2(fdim, __builtin_fdimf)                                                            \
  SOFTMETAL_EXACT2(copysign, __builtin_copysignf)                                                    \
  SOFTMETAL_EXACT2(step, ::softmetal::step)                                                          \
  SOFTMETAL_EXACT2(fmin, __builtin_fminf)                                                            \
  SOFTMETAL_EXACT2(fmax, __builtin_fmaxf)                                                            \
  SOFTMETAL_EXACT2(min, __builtin_fminf)                                                             \
  SOFTMETAL_EXACT2(max, __builtin_fmaxf)                                                             \
  SOFTMETAL_TERNARY(fma, ::softmetal::fma_of, ::softmetal::fma_of)                                   \
  SOFTMETAL_EXACT3(mix, ::softmetal::mix)                                                            \
  SOFTMETAL_EXACT3(smoothstep, ::softmetal::smoothstep)                                              \
  SOFTMETAL_EXACT3(min3, ::softmetal::min3)                                                          \
  SOFTMETAL_EXACT3(max3, ::softmetal::max3)                                                          \
  SOFTMETAL_EXACT3(median3, ::softmetal::median3)                                                    \
  SOFTMETAL_EXACT3(fmin3, ::softmetal::min3)                                                         \
  SOFTMETAL_EXACT3(fmax3, ::softmetal::max3)                                                         \
  SOFTMETAL_EXACT3(fmedian3, ::softmetal::median3)                                                   \
  SOFTMETAL_INLINE float clamp(float x, float low, float high) { return min(max(x, low), high); }    \
  SOFTMETAL_INLINE half clamp(half x, half low, half high) { return min(max(x, low), high); }        \
  template <class T,                                                                                 \
            ::metal::enable_if_t<::metal::is_floating_point_v<::softmetal::element_of<T>>, int> = 0> \
  SOFTMETAL_INLINE T sincos(T x, ::softmetal::undeduced<T>& cosine) {                                \
    return cosine = T(cos(x)), T(sin(x));                                                            \
  }

namespace metal {
namespace precise {
SOFTMETAL_MATH(precise)
}
namespace fast {
SOFTMETAL_MATH(fast)
}
#if SOFTMETAL_FAST_FUNCTIONS
SOFTMETAL_MATH(fast)
#else
SOFTMETAL_MATH(precise)
#endif

// Parts of a number, equal in every variant.
template <class T>
using if_scalar_float = enable_if_t<is_floating_point_v<T>, int>;
template <class T, if_scalar_float<T> = 0>
SOFTMETAL_INLINE T modf(T x, softmetal::undeduced<T>& whole) {
  whole = T(__builtin_truncf((float)x));
  return T(__builtin_copysignf(__builtin_isinf((float)x) ? 0.0f : (float)x - (float)whole, (float)x));
}
template <class T, if_scalar_float<T> = 0>
SOFTMETAL_INLINE T frexp(T x, int& exponent) {
  exponent = 0;
  return T(__builtin_frexpf((float)x, &exponent));
}
template <class T, if_scalar_float<T> = 0>
SOFTMETAL_INLINE T ldexp(T x, int exponent) {
  return T(__builtin_ldexp((double)x, exponent));
}
template <class T, if_scalar_float<T> = 0>
SOFTMETAL_INLINE int ilogb(T x) {
  return __builtin_ilogbf((float)x);
}
SOFTMETAL_INLINE float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }
SOFTMETAL_INLINE half nextafter(half x, half y) {
  if (x == y || x != x || y != y) return x == y ? y : x + y;
  const short bits = __builtin_bit_cast(short, x);
  if (x == (half)0) return __builtin_copysignf16(__builtin_bit_cast(half, short(1)), y);
  return __builtin_bit_cast(half, short((x < y) == (x > (half)0) ? bits + 1 : bits - 1));
}
template <class T, int N, if_scalar_float<T> = 0>
SOFTMETAL_INLINE vec<T, N> modf(vec<T, N> x, vec<T, N>& whole) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) {
    T part;
    r[i] = modf(T(x[i]), part);
    whole[i] = part;
  }
  return r;
}
template <class T, int N, if_scalar_float<T> = 0>
SOFTMETAL_INLINE vec<T, N> frexp(vec<T, N> x, vec<int, N>& exponent) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) {
    int part;
    r[i] = frexp(T(x[i]), part);
    exponent[i] = part;
  }
  return r;
}
template <class T, int N, if_scalar_float<T> = 0>
SOFTMETAL_INLINE vec<T, N> ldexp(vec<T, N> x, vec<int, N> exponent) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = ldexp(T(x[i]), int(exponent[i]));
  return r;
}
template <class T, int N, if_scalar_float<T> = 0>
SOFTMETAL_INLINE vec<int, N> ilogb(vec<T, N> x) {
  vec<int, N> r;
  for (int i = 0; i < N; ++i) r[i] = ilogb(T(x[i]));
  return r;
}
template <class T, int N, if_scalar_float<T> = 0>
SOFTMETAL_INLINE vec<T, N> nextafter(vec<T, N> x, vec<T, N> y) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = nextafter(T(x[i]), T(y[i]));
  return r;
}
template <class T, softmetal::if_bfloat<T> = 0>
SOFTMETAL_INLINE float clamp(T x, T low, T high) {
  return clamp((float)x, (float)low, (float)high);
}

template <class T, int N, if_scalar_float<T> = 0>
SOFTMETAL_INLINE vec<T, N> clamp(vec<T, N> x, softmetal::undeduced<vec<T, N>> low,
                                 softmetal::undeduced<vec<T, N>> high) {
  return min(max(x, low), high);
}
}  // namespace metal
