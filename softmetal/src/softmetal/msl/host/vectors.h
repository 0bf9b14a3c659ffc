// Construction of vectors: float4(a, b.xy, c) is translated to softmetal::make<float4>(a, b.xy, c).
#pragma once
#pragma clang system_header
#include "traits.h"

namespace softmetal {
// An element converted to another type. clang has no conversion between half and bfloat.
template <class T, class A>
SOFTMETAL_INLINE constexpr T to_scalar(A&& a) {
  using Source = remove_cv_t<remove_reference_t<A>>;
  constexpr bool both16 =
      (is_same_v<T, half> && is_same_v<Source, bfloat>) || (is_same_v<T, bfloat> && is_same_v<Source, half>);
  if constexpr (both16) {
    return (T)(float)a;
  } else if constexpr (is_same_v<T, Boolean>) {
    return (T)(a != (Source)0);
  } else {
    return (T) static_cast<A&&>(a);
  }
}

template <class V, int I>
SOFTMETAL_INLINE constexpr void fill(V&) {
  static_assert(I == vector_size<V>, "the constructor's arguments do not fill the vector");
}
template <class V, int I, class A, class... Rest>
SOFTMETAL_INLINE constexpr void fill(V& v, A a, Rest... rest) {
  constexpr int n = vector_size<A>;
  static_assert(I + n <= vector_size<V>, "the constructor has more arguments than the vector has elements");
  if constexpr (n == 1) {
    v[I] = to_scalar<element_of<V>>(a);
  } else {
    const vec<element_of<A>, n> part = a;
    for (int k = 0; k < n; ++k) v[I + k] = to_scalar<element_of<V>>(element_of<A>(part[k]));
  }
  fill<V, I + n>(v, rest...);
}

template <class V, class A>
SOFTMETAL_INLINE constexpr V make_from_one(A a) {
  if constexpr (vector_size<A> == 1) {
    return V(to_scalar<element_of<V>>(a));
  } else {
    static_assert(vector_size<A> == vector_size<V>,
                  "a vector can be constructed from one of the same size only");
    const vec<element_of<A>, vector_size<A>> source = a;
    // By element: clang has no conversion of half to bfloat, and only scalar conversions saturate.
    if constexpr (is_floating_point_v<element_of<A>> || is_same_v<element_of<V>, Boolean>) {
      V converted = V((element_of<V>)0);
      for (int i = 0; i < vector_size<V>; ++i)
        converted[i] = to_scalar<element_of<V>>(element_of<A>(source[i]));
      return converted;
    } else {
      return __builtin_convertvector(source, V);
    }
  }
}

template <class V, class... A>
SOFTMETAL_INLINE constexpr V make_vector(A... a) {
  if constexpr (sizeof...(A) == 0) {
    return V((element_of<V>)0);
  } else if constexpr (sizeof...(A) == 1) {
    return make_from_one<V>(a...);
  } else if constexpr (sizeof...(A) == vector_size<V>) {
    return V{to_scalar<element_of<V>>(a)...};
  } else {
    V v = V((element_of<V>)0);
    fill<V, 0>(v, a...);
    return v;
  }
}

template <class T, class... A>
SOFTMETAL_INLINE constexpr T make_scalar(A&&... a) {
  return T(static_cast<A&&>(a)...);
}
template <class T, class A, enable_if_t<is_arithmetic_v<T>, int> = 0>
SOFTMETAL_INLINE constexpr T make_scalar(A&& a) {
  return to_scalar<T>(static_cast<A&&>(a));
}

// Arguments by value: an element of a vector cannot be bound to a reference.
template <class T, class... A>
SOFTMETAL_INLINE constexpr T make(A... a) {
  if constexpr (vector_size<T> == 1) {
    return make_scalar<T>(static_cast<A&&>(a)...);
  } else if constexpr (__is_class(T)) {  // a packed type
    return T(make_vector<vec<element_of<T>, vector_size<T>>>(a...));
  } else {
    return make_vector<T>(a...);
  }
}

// comparisons.py puts these around comparisons and around the operands of !, && and ||. clang's comparisons
// of vectors return integers, 0 and -1, and its logical operators take vectors of integers, but not of bool.
template <class T>
SOFTMETAL_INLINE constexpr T truth(T comparison) {
  return comparison;
}
template <class T, int N>
SOFTMETAL_INLINE constexpr booleans<N> truth(vec<T, N> comparison) {
  booleans<N> r = booleans<N>(false);
  for (int i = 0; i < N; ++i) r[i] = comparison[i] != 0;
  return r;
}
template <class T>
SOFTMETAL_INLINE constexpr T condition(T operand) {
  return operand;
}
template <int N>
SOFTMETAL_INLINE constexpr vec<char, N> condition(booleans<N> operand) {
  vec<char, N> r = vec<char, N>(0);
  for (int i = 0; i < N; ++i) r[i] = operand[i];
  return r;
}

// static_cast<T>(x) and (T)x where T may be a vector.
template <class T, class A>
SOFTMETAL_INLINE constexpr T convert(A a) {
  if constexpr (vector_size<T> > 1) {
    return make<T>(a);
  } else {
    return to_scalar<T>(static_cast<A&&>(a));
  }
}

// Thread attributes may be scalars or vectors of up to three elements.
template <class P>
SOFTMETAL_INLINE P position(uint32_t x, uint32_t y, uint32_t z) {
  using E = element_of<P>;
  if constexpr (vector_size<P> == 3) {
    return P{(E)x, (E)y, (E)z};
  } else if constexpr (vector_size<P> == 2) {
    return P{(E)x, (E)y};
  } else {
    return (P)x;
  }
}
}  // namespace softmetal
