// atomic_thread_fence (MSL 3.2). The orders have a separate type: atomic operations take only the relaxed
// one. One thread runs at a time and memory is coherent, so a fence is empty.
#pragma once
#pragma clang system_header
#include "atomics.h"

namespace metal {
enum fence_order {
  memory_order_acquire = __ATOMIC_ACQUIRE,
  memory_order_release = __ATOMIC_RELEASE,
  memory_order_acq_rel = __ATOMIC_ACQ_REL,
  memory_order_seq_cst = __ATOMIC_SEQ_CST
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};
SOFTMETAL_INLINE void atomic_thread_fence(mem_flags, fence_order, thread_scope = thread_scope_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
SOFTMETAL_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}
}  // namespace metal
