// <metal_geometric>: products and norms of vectors.
#pragma once
#pragma clang system_header
#include "math.h"

namespace metal {
// Overloads instead of templates: they are preferred to a program's `template <class T> float dot(T, T)`.
#define SOFTMETAL_DOT(T, N)                                    \
  SOFTMETAL_INLINE constexpr T dot(vec<T, N> a, vec<T, N> b) { \
    T sum = a[0] * b[0];                                       \
    for (int i = 1; i < N; ++i) sum += a[i] * b[i];            \
    return sum;                                                \
  }
#define SOFTMETAL_DOTS(T) SOFTMETAL_DOT(T, 2) SOFTMETAL_DOT(T, 3) SOFTMETAL_DOT(T, 4)
SOFTMETAL_DOTS(half)
SOFTMETAL_DOTS(bfloat)
SOFTMETAL_DOTS(float)
#undef SOFTMETAL_DOTS
#undef SOFTMETAL_DOT
template <class T, int N>
SOFTMETAL_INLINE T length_squared(vec<T, N> a) {
  return dot(a, a);
}
#define SOFTMETAL_NORMS                                   \
  template <class T, int N>                               \
  SOFTMETAL_INLINE T length(vec<T, N> a) {                \
    return (T)sqrt(dot(a, a));                            \
  }                                                       \
  template <class T, int N>                               \
  SOFTMETAL_INLINE T distance(vec<T, N> a, vec<T, N> b) { \
    const vec<T, N> difference = a - b;                   \
    return (T)sqrt(dot(difference, difference));          \
  }                                                       \
  template <class T, int N>                               \
  SOFTMETAL_INLINE vec<T, N> normalize(vec<T, N> a) {     \
    return a * (T)rsqrt(dot(a, a));                       \
  }
SOFTMETAL_NORMS
namespace fast {
SOFTMETAL_NORMS
}
namespace precise {
SOFTMETAL_NORMS
}
#undef SOFTMETAL_NORMS
template <class T>
SOFTMETAL_INLINE vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return a.yzx * b.zxy - a.zxy * b.yzx;
}
}  // namespace metal
