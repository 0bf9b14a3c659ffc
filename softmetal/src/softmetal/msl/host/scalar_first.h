// Functions of two vectors called with a number first, such as `fmax(0, v)`, and select with one number.
// Apple has an overload for each type, to which the number converts; the templates in math.h and relational.h
// deduce their type from the first argument.
#pragma once
#pragma clang system_header
#include "relational.h"

namespace metal {
#define SOFTMETAL_SCALAR_FIRST(NAME)                                           \
  template <class S, class T, int N, enable_if_t<is_arithmetic_v<S>, int> = 0> \
  SOFTMETAL_INLINE vec<T, N> NAME(S a, vec<T, N> b) {                          \
    return NAME(vec<T, N>((T)a), b);                                           \
  }
SOFTMETAL_SCALAR_FIRST(min)
SOFTMETAL_SCALAR_FIRST(max)
SOFTMETAL_SCALAR_FIRST(fmin)
SOFTMETAL_SCALAR_FIRST(fmax)
SOFTMETAL_SCALAR_FIRST(pow)
SOFTMETAL_SCALAR_FIRST(powr)
SOFTMETAL_SCALAR_FIRST(fmod)
SOFTMETAL_SCALAR_FIRST(step)
#undef SOFTMETAL_SCALAR_FIRST
template <class T, int N, class S, class C, enable_if_t<is_arithmetic_v<S>, int> = 0>
SOFTMETAL_INLINE vec<T, N> select(vec<T, N> a, S b, vec<C, N> c) {
  return select(a, vec<T, N>((T)b), c);
}
template <class S, class T, int N, class C, enable_if_t<is_arithmetic_v<S>, int> = 0>
SOFTMETAL_INLINE vec<T, N> select(S a, vec<T, N> b, vec<C, N> c) {
  return select(vec<T, N>((T)a), b, c);
}
}  // namespace metal
