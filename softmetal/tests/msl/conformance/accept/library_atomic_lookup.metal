// certain: atomic functions without a namespace are found by their arguments (C++ [basic.lookup.argdep])
#include <metal_stdlib>
kernel void k(device metal::atomic_uint* c [[buffer(0)]], device metal::atomic<int>* d [[buffer(1)]],
              volatile device metal::atomic_float* e [[buffer(2)]]) {
  threadgroup metal::atomic_uint t;
  atomic_store_explicit(&t, 0u, metal::memory_order_relaxed);
  uint old = atomic_fetch_add_explicit(c, 1u, metal::memory_order_relaxed);
  atomic_fetch_max_explicit(d, 3, metal::memory_order_relaxed);
  atomic_fetch_add_explicit(e, 1.0f, metal::memory_order_relaxed);
  int expected = 2;
  atomic_compare_exchange_weak_explicit(d, &expected, 1, metal::memory_order_relaxed, metal::memory_order_relaxed);
  atomic_exchange_explicit(c, old + atomic_load_explicit(&t, metal::memory_order_relaxed), metal::memory_order_relaxed);
}
