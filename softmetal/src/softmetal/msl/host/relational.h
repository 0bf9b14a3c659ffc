// <metal_relational>: classification of numbers; any, all and select.
#pragma once
#pragma clang system_header
#include "math.h"

namespace metal {
#define SOFTMETAL_CLASSIFY(NAME, TEST)                                    \
  SOFTMETAL_INLINE constexpr bool NAME(float x) { return TEST(x); }       \
  SOFTMETAL_INLINE constexpr bool NAME(half x) { return TEST((float)x); } \
  template <class T, softmetal::if_bfloat<T> = 0>                         \
  SOFTMETAL_INLINE constexpr bool NAME(T x) {                             \
    return TEST((float)x);                                                \
  }                                                                       \
  template <class T, int N, enable_if_t<is_floating_point_v<T>, int> = 0> \
  SOFTMETAL_INLINE softmetal::booleans<N> NAME(vec<T, N> x) {             \
    softmetal::booleans<N> r;                                             \
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
