// Casts: as_type, and C-style casts of pointers, which may not change the address space.
#pragma once
#pragma clang system_header
#include "vectors.h"

namespace softmetal {
#define SOFTMETAL_POINTER_CAST(SPACE)                                                               \
  template <class P, class T>                                                                       \
  SOFTMETAL_INLINE P pointer_cast(SPACE T* pointer) __attribute__((diagnose_if(                     \
      pointee_space<P>::value != pointee_space<SPACE T*>::value,                                    \
      "a cast cannot change the address space of a pointer", "error"))) {                           \
    if constexpr (pointee_space<P>::value == pointee_space<SPACE T*>::value) return (P)pointer;     \
    return nullptr;                                                                                 \
  }
SOFTMETAL_POINTER_CAST()
SOFTMETAL_POINTER_CAST(SOFTMETAL_DEVICE)
SOFTMETAL_POINTER_CAST(SOFTMETAL_THREADGROUP)
SOFTMETAL_POINTER_CAST(__attribute__((opencl_constant)))
#undef SOFTMETAL_POINTER_CAST
template <class P>
SOFTMETAL_INLINE P pointer_cast(ulong address) {
  return (P)address;
}
}  // namespace softmetal

namespace metal {
template <class T, class U>
SOFTMETAL_INLINE constexpr T as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of the same size");
  return __builtin_bit_cast(T, value);
}
}  // namespace metal
using metal::as_type;
