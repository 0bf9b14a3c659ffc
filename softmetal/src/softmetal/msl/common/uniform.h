// <metal_uniform>: uniform<T>, a value that is equal in all threads of a simdgroup; this is not checked.
#pragma once

namespace metal {
template <class T>
struct uniform {
  T value_;
  SOFTMETAL_INLINE constexpr operator T() const { return value_; }
};
template <class T>
SOFTMETAL_INLINE constexpr uniform<T> make_uniform(T value) {
  return {value};
}
#define SOFTMETAL_UNIFORM(OPERATOR)                                               \
  template <class T, class U>                                                     \
  SOFTMETAL_INLINE constexpr auto operator OPERATOR(uniform<T> a, uniform<U> b) { \
    return make_uniform(a.value_ OPERATOR b.value_);                              \
  }
SOFTMETAL_UNIFORM(+)
SOFTMETAL_UNIFORM(-)
SOFTMETAL_UNIFORM(*)
SOFTMETAL_UNIFORM(/)
SOFTMETAL_UNIFORM(%)
SOFTMETAL_UNIFORM(&)
SOFTMETAL_UNIFORM(|)
SOFTMETAL_UNIFORM(^)
SOFTMETAL_UNIFORM(<<)
SOFTMETAL_UNIFORM(>>)
SOFTMETAL_UNIFORM(==)
SOFTMETAL_UNIFORM(!=)
SOFTMETAL_UNIFORM(<)
SOFTMETAL_UNIFORM(>)
SOFTMETAL_UNIFORM(<=)
SOFTMETAL_UNIFORM(>=)
#undef SOFTMETAL_UNIFORM
}  // namespace metal
