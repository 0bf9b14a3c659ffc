// <metal_math>, <metal_common> on floating-point types, <metal_relational>; namespaces fast and precise are
// the same functions.
//
// half and bfloat are computed in float and rounded once. bfloat versions are templates that return float:
// Apple has none (a bfloat argument becomes a float there), and programs define their own in namespace metal.
#pragma once
#pragma clang system_header
#include "integer.h"

extern "C" {
float exp10f(float);
}

namespace softmetal {
template <class T>
using if_bfloat = enable_if_t<is_same_v<T, bfloat>, int>;

SOFTMETAL_INLINE float counted_exp(float x) { return softmetal_count_exp(), __builtin_expf(x); }
SOFTMETAL_INLINE float counted_exp2(float x) { return softmetal_count_exp(), __builtin_exp2f(x); }
SOFTMETAL_INLINE float counted_exp10(float x) { return softmetal_count_exp(), exp10f(x); }
SOFTMETAL_INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
SOFTMETAL_INLINE float sinpi(float x) { return __builtin_sinf(x * 3.14159265358979323846f); }
SOFTMETAL_INLINE float cospi(float x) { return __builtin_cosf(x * 3.14159265358979323846f); }
SOFTMETAL_INLINE float tanpi(float x) { return __builtin_tanf(x * 3.14159265358979323846f); }
SOFTMETAL_INLINE float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f; }
SOFTMETAL_INLINE float saturate(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f); }
SOFTMETAL_INLINE float fract(float x) { return __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f); }
SOFTMETAL_INLINE float divide(float x, float y) { return x / y; }
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
}  // namespace softmetal

#define SOFTMETAL_UNARY(NAME, FLOAT)                                                        \
  SOFTMETAL_INLINE float NAME(float x) { return FLOAT(x); }                                 \
  SOFTMETAL_INLINE half NAME(half x) { return (half)FLOAT((float)x); }                      \
  template <class T, ::softmetal::if_bfloat<T> = 0>                                         \
  SOFTMETAL_INLINE float NAME(T x) {                                                        \
    return FLOAT((float)x);                                                                 \
  }                                                                                         \
  template <class T, int N, ::metal::enable_if_t<::metal::is_floating_point_v<T>, int> = 0> \
  SOFTMETAL_INLINE ::metal::vec<T, N> NAME(::metal::vec<T, N> x) {                          \
    ::metal::vec<T, N> r;                                                                   \
    for (int i = 0; i < N; ++i) r[i] = (T)FLOAT((float)x[i]);                               \
    return r;                                                                               \
  }
#define SOFTMETAL_BINARY(NAME, FLOAT)                                                       \
  SOFTMETAL_INLINE float NAME(float x, float y) { return FLOAT(x, y); }                     \
  SOFTMETAL_INLINE half NAME(half x, half y) { return (half)FLOAT((float)x, (float)y); }    \
  template <class T, ::softmetal::if_bfloat<T> = 0>                                         \
  SOFTMETAL_INLINE float NAME(T x, T y) {                                                   \
    return FLOAT((float)x, (float)y);                                                       \
  }                                                                                         \
  template <class T, int N, ::metal::enable_if_t<::metal::is_floating_point_v<T>, int> = 0> \
  SOFTMETAL_INLINE ::metal::vec<T, N> NAME(::metal::vec<T, N> x,                            \
                                           ::softmetal::undeduced<::metal::vec<T, N>> y) {  \
    ::metal::vec<T, N> r;                                                                   \
    for (int i = 0; i < N; ++i) r[i] = (T)FLOAT((float)x[i], (float)y[i]);                  \
    return r;                                                                               \
  }
#define SOFTMETAL_TERNARY(NAME, FLOAT)                                                                     \
  SOFTMETAL_INLINE float NAME(float x, float y, float z) { return FLOAT(x, y, z); }                        \
  SOFTMETAL_INLINE half NAME(half x, half y, half z) { return (half)FLOAT((float)x, (float)y, (float)z); } \
  template <class T, ::softmetal::if_bfloat<T> = 0>                                                        \
  SOFTMETAL_INLINE float NAME(T x, T y, T z) {                                                             \
    return FLOAT((float)x, (float)y, (float)z);                                                            \
  }                                                                                                        \
  template <class T, int N, ::metal::enable_if_t<::metal::is_floating_point_v<T>, int> = 0>                \
  SOFTMETAL_INLINE ::metal::vec<T, N> NAME(::metal::vec<T, N> x,                                           \
                                           ::softmetal::undeduced<::metal::vec<T, N>> y,                   \
                                           ::softmetal::undeduced<::metal::vec<T, N>> z) {                 \
    ::metal::vec<T, N> r;                                                                                  \
    for (int i = 0; i < N; ++i) r[i] = (T)FLOAT((float)x[i], (float)y[i], (float)z[i]);                    \
    return r;                                                                                              \
  }

#define SOFTMETAL_MATH                                                                            \
  SOFTMETAL_UNARY(exp, ::softmetal::counted_exp)                                                  \
  SOFTMETAL_UNARY(exp2, ::softmetal::counted_exp2)                                                \
  SOFTMETAL_UNARY(exp10, ::softmetal::counted_exp10)                                              \
  SOFTMETAL_UNARY(log, __builtin_logf)                                                            \
  SOFTMETAL_UNARY(log2, __builtin_log2f)                                                          \
  SOFTMETAL_UNARY(log10, __builtin_log10f)                                                        \
  SOFTMETAL_UNARY(sqrt, __builtin_sqrtf)                                                          \
  SOFTMETAL_UNARY(rsqrt, ::softmetal::rsqrt)                                                      \
  SOFTMETAL_UNARY(sin, __builtin_sinf)                                                            \
  SOFTMETAL_UNARY(cos, __builtin_cosf)                                                            \
  SOFTMETAL_UNARY(tan, __builtin_tanf)                                                            \
  SOFTMETAL_UNARY(sinpi, ::softmetal::sinpi)                                                      \
  SOFTMETAL_UNARY(cospi, ::softmetal::cospi)                                                      \
  SOFTMETAL_UNARY(tanpi, ::softmetal::tanpi)                                                      \
  SOFTMETAL_UNARY(asin, __builtin_asinf)                                                          \
  SOFTMETAL_UNARY(acos, __builtin_acosf)                                                          \
  SOFTMETAL_UNARY(atan, __builtin_atanf)                                                          \
  SOFTMETAL_UNARY(sinh, __builtin_sinhf)                                                          \
  SOFTMETAL_UNARY(cosh, __builtin_coshf)                                                          \
  SOFTMETAL_UNARY(tanh, __builtin_tanhf)                                                          \
  SOFTMETAL_UNARY(asinh, __builtin_asinhf)                                                        \
  SOFTMETAL_UNARY(acosh, __builtin_acoshf)                                                        \
  SOFTMETAL_UNARY(atanh, __builtin_atanhf)                                                        \
  SOFTMETAL_UNARY(fabs, __builtin_fabsf)                                                          \
  SOFTMETAL_UNARY(abs, __builtin_fabsf)                                                           \
  SOFTMETAL_UNARY(floor, __builtin_floorf)                                                        \
  SOFTMETAL_UNARY(ceil, __builtin_ceilf)                                                          \
  SOFTMETAL_UNARY(rint, __builtin_rintf)                                                          \
  SOFTMETAL_UNARY(round, __builtin_roundf)                                                        \
  SOFTMETAL_UNARY(trunc, __builtin_truncf)                                                        \
  SOFTMETAL_UNARY(fract, ::softmetal::fract)                                                      \
  SOFTMETAL_UNARY(sign, ::softmetal::sign)                                                        \
  SOFTMETAL_UNARY(saturate, ::softmetal::saturate)                                                \
  SOFTMETAL_BINARY(pow, __builtin_powf)                                                           \
  SOFTMETAL_BINARY(powr, __builtin_powf)                                                          \
  SOFTMETAL_BINARY(atan2, __builtin_atan2f)                                                       \
  SOFTMETAL_BINARY(fmod, __builtin_fmodf)                                                         \
  SOFTMETAL_BINARY(fdim, __builtin_fdimf)                                                         \
  SOFTMETAL_BINARY(copysign, __builtin_copysignf)                                                 \
  SOFTMETAL_BINARY(divide, ::softmetal::divide)                                                   \
  SOFTMETAL_BINARY(step, ::softmetal::step)                                                       \
  SOFTMETAL_BINARY(fmin, __builtin_fminf)                                                         \
  SOFTMETAL_BINARY(fmax, __builtin_fmaxf)                                                         \
  SOFTMETAL_BINARY(min, __builtin_fminf)                                                          \
  SOFTMETAL_BINARY(max, __builtin_fmaxf)                                                          \
  SOFTMETAL_TERNARY(fma, __builtin_fmaf)                                                          \
  SOFTMETAL_TERNARY(mix, ::softmetal::mix)                                                        \
  SOFTMETAL_TERNARY(smoothstep, ::softmetal::smoothstep)                                          \
  SOFTMETAL_TERNARY(min3, ::softmetal::min3)                                                      \
  SOFTMETAL_TERNARY(max3, ::softmetal::max3)                                                      \
  SOFTMETAL_TERNARY(median3, ::softmetal::median3)                                                \
  SOFTMETAL_TERNARY(fmin3, ::softmetal::min3)                                                     \
  SOFTMETAL_TERNARY(fmax3, ::softmetal::max3)                                                     \
  SOFTMETAL_TERNARY(fmedian3, ::softmetal::median3)                                               \
  SOFTMETAL_INLINE float clamp(float x, float low, float high) { return min(max(x, low), high); } \
  SOFTMETAL_INLINE half clamp(half x, half low, half high) { return min(max(x, low), high); }     \
  SOFTMETAL_INLINE float sincos(float x, float& cosine) {                                         \
    return cosine = __builtin_cosf(x), __builtin_sinf(x);                                         \
  }                                                                                               \
  SOFTMETAL_INLINE float modf(float x, float& whole) {                                            \
    whole = __builtin_truncf(x);                                                                  \
    return __builtin_copysignf(__builtin_isinf(x) ? 0.0f : x - whole, x);                         \
  }                                                                                               \
  SOFTMETAL_INLINE float frexp(float x, int& exponent) { return __builtin_frexpf(x, &exponent); } \
  SOFTMETAL_INLINE float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }   \
  SOFTMETAL_INLINE half ldexp(half x, int exponent) { return (half)__builtin_ldexpf((float)x, exponent); }

namespace metal {
SOFTMETAL_MATH
namespace fast {
SOFTMETAL_MATH
}
namespace precise {
SOFTMETAL_MATH
}
SOFTMETAL_INLINE float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }
SOFTMETAL_INLINE int ilogb(float x) { return __builtin_ilogbf(x); }
template <class T, softmetal::if_bfloat<T> = 0>
SOFTMETAL_INLINE float clamp(T x, T low, T high) {
  return clamp((float)x, (float)low, (float)high);
}

// Vectors of integers, and clamp of any vector.
#define SOFTMETAL_INTEGER_VECTORS(NAME)                                             \
  template <class T, int N, enable_if_t<is_integral_v<T>, int> = 0>                 \
  SOFTMETAL_INLINE vec<T, N> NAME(vec<T, N> a, softmetal::undeduced<vec<T, N>> b) { \
    vec<T, N> r;                                                                    \
    for (int i = 0; i < N; ++i) r[i] = NAME(T(a[i]), T(b[i]));                      \
    return r;                                                                       \
  }
SOFTMETAL_INTEGER_VECTORS(min)
SOFTMETAL_INTEGER_VECTORS(max)
#undef SOFTMETAL_INTEGER_VECTORS
template <class T, int N, enable_if_t<is_integral_v<T>, int> = 0>
SOFTMETAL_INLINE vec<T, N> abs(vec<T, N> a) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = abs(T(a[i]));
  return r;
}
template <class T, int N>
SOFTMETAL_INLINE vec<T, N> clamp(vec<T, N> x, softmetal::undeduced<vec<T, N>> low,
                                 softmetal::undeduced<vec<T, N>> high) {
  return min(max(x, low), high);
}

// Relational functions. A comparison of vectors gives a vector of integers here, 0 or -1 by element.
#define SOFTMETAL_CLASSIFY(NAME, TEST)                                    \
  SOFTMETAL_INLINE constexpr bool NAME(float x) { return TEST(x); }       \
  SOFTMETAL_INLINE constexpr bool NAME(half x) { return TEST((float)x); } \
  template <class T, softmetal::if_bfloat<T> = 0>                         \
  SOFTMETAL_INLINE constexpr bool NAME(T x) {                             \
    return TEST((float)x);                                                \
  }                                                                       \
  template <class T, int N, enable_if_t<is_floating_point_v<T>, int> = 0> \
  SOFTMETAL_INLINE softmetal::booleans<N> NAME(vec<T, N> x) {                       \
    softmetal::booleans<N> r;                                                       \
    for (int i = 0; i < N; ++i) r[i] = TEST((float)x[i]);                 \
    return r;                                                             \
  }
SOFTMETAL_CLASSIFY(isnan, __builtin_isnan)
SOFTMETAL_CLASSIFY(isinf, __builtin_isinf)
SOFTMETAL_CLASSIFY(isfinite, __builtin_isfinite)
SOFTMETAL_CLASSIFY(isnormal, __builtin_isnormal)
SOFTMETAL_CLASSIFY(signbit, __builtin_signbit)
#undef SOFTMETAL_CLASSIFY
template <class T>
SOFTMETAL_INLINE bool isunordered(T a, softmetal::undeduced<T> b) {
  return __builtin_isunordered((float)a, (float)b);
}
template <class T>
SOFTMETAL_INLINE bool isordered(T a, softmetal::undeduced<T> b) {
  return !isunordered(a, b);
}

template <class T, int N>
SOFTMETAL_INLINE bool any(vec<T, N> x) {
  bool r = false;
  for (int i = 0; i < N; ++i) r = r || x[i];
  return r;
}
template <class T, int N>
SOFTMETAL_INLINE bool all(vec<T, N> x) {
  bool r = true;
  for (int i = 0; i < N; ++i) r = r && x[i];
  return r;
}
SOFTMETAL_INLINE bool any(bool x) { return x; }
SOFTMETAL_INLINE bool all(bool x) { return x; }

template <class T>
SOFTMETAL_INLINE constexpr T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N, class C>
SOFTMETAL_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = c[i] ? b[i] : a[i];
  return r;
}
}  // namespace metal
