// Casts: as_type, and C-style casts of pointers, which may not change the address space.
#pragma once
#pragma clang system_header
#include "vectors.h"

namespace softmetal {
// (device T*)p is translated to (device T*)in_space<space::device>(p): the cast stays, and keeps the
// alignment of packed types.
#define SOFTMETAL_IN_SPACE(SPACE)                                                                    \
  template <space wanted, class T>                                                                   \
  SOFTMETAL_INLINE SPACE T* in_space(SPACE T* pointer)                                               \
      __attribute__((diagnose_if(wanted != pointee_space<SPACE T*>::value,                           \
                                 "a cast cannot change the address space of a pointer", "error"))) { \
    return pointer;                                                                                  \
  }
SOFTMETAL_IN_SPACE()
SOFTMETAL_IN_SPACE(SOFTMETAL_DEVICE)
SOFTMETAL_IN_SPACE(SOFTMETAL_THREADGROUP)
SOFTMETAL_IN_SPACE(SOFTMETAL_CONSTANT_SPACE)
#undef SOFTMETAL_IN_SPACE
template <space>
SOFTMETAL_INLINE ulong in_space(ulong address) {
  return address;
}
template <space>
SOFTMETAL_INLINE decltype(nullptr) in_space(decltype(nullptr)) {
  return nullptr;
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
