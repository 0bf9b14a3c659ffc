// metal::uniform<T>: a value that is equal in all threads of a simdgroup.
#pragma once

#include "vectors.h"

namespace metal {

template <typename T>
struct uniform {
  T value;
  SOFTMETAL_INLINE constexpr operator T() const { return value; }
};
template <typename T>
SOFTMETAL_INLINE constexpr uniform<T> make_uniform(T value) {
  return {value};
}
#define SOFTMETAL_UNIFORM(op)                                               \
  template <typename T, typename U>                                         \
  SOFTMETAL_INLINE constexpr auto operator op(uniform<T> a, uniform<U> b) { \
    return make_uniform(a.value op b.value);                                \
  }
SOFTMETAL_UNIFORM(+)
SOFTMETAL_UNIFORM(-)
SOFTMETAL_UNIFORM(*)
SOFTMETAL_UNIFORM(/)
#undef SOFTMETAL_UNIFORM

}  // namespace metal
