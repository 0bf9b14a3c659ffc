// <metal_atomic>: relaxed atomics on int, uint, ulong, bool and float in device and threadgroup memory.
#pragma once
#pragma clang system_header
#include "math.h"

namespace metal {
enum memory_order { memory_order_relaxed = __ATOMIC_RELAXED };

template <class T>
struct atomic {
  T value_;
  atomic() = default;
  atomic(const atomic&) = delete;
  atomic& operator=(const atomic&) = delete;
};
template <class T>
using _atomic = atomic<T>;  // Apple's private name
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_ulong = atomic<ulong>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;

}  // namespace metal

namespace softmetal {
// clang's atomic builtins need their pointers in one address space.
#define SOFTMETAL_STORAGE(SPACE)                                               \
  template <class T>                                                           \
  SOFTMETAL_INLINE T* storage(const volatile SPACE metal::atomic<T>* object) { \
    return (T*)object;                                                         \
  }
SOFTMETAL_STORAGE(SOFTMETAL_DEVICE)
SOFTMETAL_STORAGE(SOFTMETAL_THREADGROUP)
#undef SOFTMETAL_STORAGE

// Compares bits, because the builtin does not take floats.
template <class T>
SOFTMETAL_INLINE bool compare_exchange(T* object, T* expected, T desired) {
  using Bits = conditional_t<sizeof(T) == 8, ulong, conditional_t<sizeof(T) == 4, uint, uchar>>;
  return __atomic_compare_exchange((Bits*)object, (Bits*)expected, (Bits*)&desired, false, __ATOMIC_RELAXED,
                                   __ATOMIC_RELAXED);
}
}  // namespace softmetal

namespace metal {
#define SOFTMETAL_ATOMIC_UPDATE(SPACE, NAME, EXPRESSION)                                             \
  template <class T>                                                                                 \
  SOFTMETAL_INLINE T atomic_fetch_##NAME##_explicit(volatile SPACE atomic<T>* object,                \
                                                    softmetal::undeduced<T> operand, memory_order) { \
    T old;                                                                                           \
    __atomic_load(softmetal::storage(object), &old, __ATOMIC_RELAXED);                               \
    while (!softmetal::compare_exchange(softmetal::storage(object), &old, (T)(EXPRESSION))) {        \
    }                                                                                                \
    return old;                                                                                      \
  }
#define SOFTMETAL_ATOMICS(SPACE)                                                                             \
  template <class T>                                                                                         \
  SOFTMETAL_INLINE T atomic_load_explicit(const volatile SPACE atomic<T>* object, memory_order) {            \
    T value;                                                                                                 \
    __atomic_load(softmetal::storage(object), &value, __ATOMIC_RELAXED);                                     \
    return value;                                                                                            \
  }                                                                                                          \
  template <class T>                                                                                         \
  SOFTMETAL_INLINE void atomic_store_explicit(volatile SPACE atomic<T>* object,                              \
                                              softmetal::undeduced<T> desired, memory_order) {               \
    __atomic_store(softmetal::storage(object), &desired, __ATOMIC_RELAXED);                                  \
  }                                                                                                          \
  template <class T>                                                                                         \
  SOFTMETAL_INLINE T atomic_exchange_explicit(volatile SPACE atomic<T>* object,                              \
                                              softmetal::undeduced<T> desired, memory_order) {               \
    T old;                                                                                                   \
    __atomic_exchange(softmetal::storage(object), &desired, &old, __ATOMIC_RELAXED);                         \
    return old;                                                                                              \
  }                                                                                                          \
  template <class T>                                                                                         \
  SOFTMETAL_INLINE bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>* object, T* expected, \
                                                              softmetal::undeduced<T> desired, memory_order, \
                                                              memory_order) {                                \
    return softmetal::compare_exchange(softmetal::storage(object), expected, (T)desired);                    \
  }                                                                                                          \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, add, old + operand)                                                         \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, sub, old - operand)                                                         \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, min, min(old, operand))                                                     \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, max, max(old, operand))                                                     \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, and, old& operand)                                                          \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, or, old | operand)                                                          \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, xor, old ^ operand)
SOFTMETAL_ATOMICS(SOFTMETAL_DEVICE)
SOFTMETAL_ATOMICS(SOFTMETAL_THREADGROUP)
#undef SOFTMETAL_ATOMICS
// For ulong, and without a result.
#define SOFTMETAL_ATOMIC_EXTREME(NAME)                                                                  \
  template <class T>                                                                                    \
  SOFTMETAL_INLINE void atomic_##NAME##_explicit(volatile SOFTMETAL_DEVICE atomic<T>* object,           \
                                                 softmetal::undeduced<T> operand, memory_order order) { \
    atomic_fetch_##NAME##_explicit(object, operand, order);                                             \
  }
SOFTMETAL_ATOMIC_EXTREME(min)
SOFTMETAL_ATOMIC_EXTREME(max)
#undef SOFTMETAL_ATOMIC_EXTREME
#undef SOFTMETAL_ATOMIC_UPDATE
}  // namespace metal
