// certain: atomic operations (MSL specification 2.6, 6.15, atomics)
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic_uint* a [[buffer(0)]], device atomic<float>* f [[buffer(1)]],
              device uint* p [[buffer(2)]], device atomic_int& n [[buffer(3)]]) {
  threadgroup atomic_int t;
  atomic_store_explicit(&t, 0, memory_order_relaxed);
  uint old = atomic_fetch_add_explicit(&a[0], 1u, memory_order_relaxed);
  atomic_fetch_max_explicit(a + 1, old, memory_order_relaxed);
  atomic_fetch_add_explicit(f, 1.0f, memory_order_relaxed);
  uint e = 3;
  bool w = atomic_compare_exchange_weak_explicit(a, &e, 4u, memory_order_relaxed, memory_order_relaxed);
  atomic_exchange_explicit(&t, 2, memory_order_relaxed);
  atomic_fetch_or_explicit((device atomic_uint*)p, 3u, memory_order_relaxed);
  atomic_fetch_sub_explicit(&n, 1, memory_order_relaxed);
  a[2];
  p[1] = w + atomic_load_explicit(&t, memory_order_relaxed);
}
