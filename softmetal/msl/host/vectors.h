// Construction of vectors: float4(a, b.xy, c) is translated to softmetal::make<float4>(a, b.xy, c).
#pragma once
#pragma clang system_header
#include "traits.h"

namespace softmetal {
// clang has no conversion between half and bfloat.
template <class T, class A>
SOFTMETAL_INLINE constexpr T to_scalar(A&& a) {
  using Source = remove_cv_t<remove_reference_t<A>>;
  constexpr bool both16 = (is_same_v<T, half> && is_same_v<Source, bfloat>) ||
                          (is_same_v<T, bfloat> && is_same_v<Source, half>);
  if constexpr (both16) {
    return (T)(float)a;
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
    v[I] = (element_of<V>)a;
  } else {
    const vec<element_of<A>, n> part = a;
    for (int k = 0; k < n; ++k) v[I + k] = (element_of<V>)part[k];
  }
  fill<V, I + n>(v, rest...);
}

template <class V, class A>
SOFTMETAL_INLINE constexpr V make_from_one(A a) {
  if constexpr (vector_size<A> == 1) {
    return V((element_of<V>)a);
  } else {
    static_assert(vector_size<A> == vector_size<V>,
                  "a vector can be constructed from one of the same size only");
    const vec<element_of<A>, vector_size<A>> source = a;
    return __builtin_convertvector(source, V);
  }
}

template <class V, class... A>
SOFTMETAL_INLINE constexpr V make_vector(A... a) {
  if constexpr (sizeof...(A) == 0) {
    return V((element_of<V>)0);
  } else if constexpr (sizeof...(A) == 1) {
    return make_from_one<V>(a...);
  } else if constexpr (sizeof...(A) == vector_size<V>) {
    return V{(element_of<V>)a...};
  } else {
    V v = V((element_of<V>)0);
    fill<V, 0>(v, a...);
    return v;
  }
}

// Arguments by value: an element of a vector cannot be bound to a reference.
template <class T, class... A>
SOFTMETAL_INLINE constexpr T make(A... a) {
  if constexpr (vector_size<T> == 1) {
    return T(static_cast<A&&>(a)...);
  } else if constexpr (__is_class(T)) {  // a packed type
    return T(make_vector<vec<element_of<T>, vector_size<T>>>(a...));
  } else {
    return make_vector<T>(a...);
  }
}

// A comparison as booleans: of vectors, it is a vector of integers 0 and -1.
template <class T>
SOFTMETAL_INLINE constexpr T truth(T comparison) {
  return comparison;
}
template <class T, int N>
SOFTMETAL_INLINE constexpr vec<bool, N> truth(vec<T, N> comparison) {
  vec<bool, N> r = vec<bool, N>(false);
  for (int i = 0; i < N; ++i) r[i] = comparison[i] != 0;
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
}  // namespace softmetal
