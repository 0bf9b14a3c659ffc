// {a, b} as an argument of a call, which braces.py translates to softmetal::braced(a, b). It converts to a
// vector with as many elements, and to a struct that the list can initialise.
#pragma once
#pragma clang system_header
#include "vectors.h"

namespace softmetal {
template <class... T>
struct voided {
  using type = void;
};
template <class T>
T&& any_value() noexcept;

// An item of the list: a number converts to any type of number, unless it would lose its fraction.
template <class A>
struct Item {
  A value;
  template <class T, enable_if_t<__is_same(T, A) || (is_arithmetic_v<A> && is_arithmetic_v<T> &&
                                                     !(is_floating_point_v<A> && is_integral_v<T>)),
                                 int> = 0>
  SOFTMETAL_INLINE operator T() const {
    return to_scalar<T>(value);
  }
};
template <class A>
constexpr bool is_number = is_arithmetic_v<element_of<A>>;

template <class... A>
constexpr int elements_of() {
  int sum = 0;
  const int sizes[] = {vector_size<A>...};
  for (int size : sizes) sum += size;
  return sum;
}
template <class V, class Enable, class... A>
struct initialises {
  static constexpr bool value = vector_size<V> > 1 && vector_size<V> == elements_of<A...>();
};
template <class V, class... A>
struct initialises<V,
                   typename voided<enable_if_t<__is_class(V) && vector_size<V> == 1>,
                                   decltype(V{any_value<Item<A>>()...})>::type,
                   A...> {
  static constexpr bool value = true;
};

template <class F, class... A>
struct Braced {
  F construct;
  template <class V, enable_if_t<initialises<V, void, A...>::value, int> = 0>
  SOFTMETAL_INLINE operator V() const {
    return construct(identity<V>());
  }
};
template <class V, class... A>
SOFTMETAL_INLINE V initialised(A... a) {
  if constexpr (vector_size<V> > 1) {
    return make<V>(a...);
  } else {
    return V{Item<A>{a}...};
  }
}
template <class F, class... A>
SOFTMETAL_INLINE Braced<F, A...> make_braced(F construct, A...) {
  return {construct};
}
template <class... A>
SOFTMETAL_INLINE auto braced(A... a) {
  return make_braced(
      [=](auto wanted)
          __attribute__((always_inline)) { return initialised<typename decltype(wanted)::type>(a...); },
      a...);
}
}  // namespace softmetal
