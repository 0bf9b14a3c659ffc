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
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_ulong = atomic<ulong>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;

#define SOFTMETAL_ATOMIC_UPDATE(SPACE, NAME, EXPRESSION)                                                           \
  template <class T>                                                                                               \
  SOFTMETAL_UNCHECKED T atomic_fetch_##NAME##_explicit(volatile SPACE atomic<T>* object,                           \
                                                       softmetal::undeduced<T> operand, memory_order) {            \
    T old = __atomic_load_n(&((SPACE atomic<T>*)object)->value_, __ATOMIC_RELAXED), desired;                       \
    do desired = (T)(EXPRESSION);                                                                                  \
    while (!__atomic_compare_exchange(&((SPACE atomic<T>*)object)->value_, &old, &desired, true, __ATOMIC_RELAXED, \
                                      __ATOMIC_RELAXED));                                                          \
    return old;                                                                                                    \
  }
#define SOFTMETAL_ATOMICS(SPACE)                                                                                    \
  template <class T>                                                                                                \
  SOFTMETAL_UNCHECKED T atomic_load_explicit(const volatile SPACE atomic<T>* object, memory_order) {                \
    T value;                                                                                                        \
    __atomic_load(&((SPACE atomic<T>*)object)->value_, &value, __ATOMIC_RELAXED);                                   \
    return value;                                                                                                   \
  }                                                                                                                 \
  template <class T>                                                                                                \
  SOFTMETAL_UNCHECKED void atomic_store_explicit(volatile SPACE atomic<T>* object, softmetal::undeduced<T> desired, \
                                                 memory_order) {                                                    \
    __atomic_store(&((SPACE atomic<T>*)object)->value_, &desired, __ATOMIC_RELAXED);                                \
  }                                                                                                                 \
  template <class T>                                                                                                \
  SOFTMETAL_UNCHECKED T atomic_exchange_explicit(volatile SPACE atomic<T>* object, softmetal::undeduced<T> desired, \
                                                 memory_order) {                                                    \
    T old;                                                                                                          \
    __atomic_exchange(&((SPACE atomic<T>*)object)->value_, &desired, &old, __ATOMIC_RELAXED);                       \
    return old;                                                                                                     \
  }                                                                                                                 \
  template <class T>                                                                                                \
  SOFTMETAL_UNCHECKED bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>* object, T* expected,     \
                                                                 softmetal::undeduced<T> desired, memory_order,     \
                                                                 memory_order) {                                    \
    return __atomic_compare_exchange(&((SPACE atomic<T>*)object)->value_, expected, &desired, true,                 \
                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED);                                           \
  }                                                                                                                 \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, add, old + operand)                                                                \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, sub, old - operand)                                                                \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, min, min(old, operand))                                                            \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, max, max(old, operand))                                                            \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, and, old & operand)                                                                \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, or, old | operand)                                                                 \
  SOFTMETAL_ATOMIC_UPDATE(SPACE, xor, old ^ operand)
SOFTMETAL_ATOMICS(SOFTMETAL_DEVICE)
SOFTMETAL_ATOMICS(SOFTMETAL_THREADGROUP)
#undef SOFTMETAL_ATOMICS
#undef SOFTMETAL_ATOMIC_UPDATE
}  // namespace metal
