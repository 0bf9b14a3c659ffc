// Atomics and barriers. The format of this file: ../catalogue.py

// --- setup
kernel void k(device int* n, device atomic_uint* a, const device atomic_int* c, device atomic_bool* b,
              device atomic<float>* f, device atomic_ulong* l, device uint* o) {
  uint e = 1;

// --- accesses | rejected (certain) | MSL 2.6; MSL 6.15 | The atomic functions, and only they, access atomic objects.
  atomic_fetch_add_explicit(n, 1, memory_order_relaxed);  // error
  atomic_store_explicit(c, 1, memory_order_relaxed);  // error
  n[0] = a[0];  // error
  a[0] += 1;  // error

// --- memory | rejected (certain) | MSL 2.6; MSL 6.15 | An atomic object is in device or threadgroup memory, and an atomic<float> in device memory.
  atomic_uint own;
  threadgroup atomic<float> shared;
  threadgroup atomic_uint other;
  atomic_store_explicit(&own, 1u, memory_order_relaxed);  // error
  atomic_store_explicit(&shared, 1.0f, memory_order_relaxed);  // error
  atomic_store_explicit(&other, 1u, memory_order_relaxed);  // accepted
  atomic_store_explicit(f, 1.0f, memory_order_relaxed);  // accepted

// --- exchanges | rejected (certain) | MSL 2.6; MSL 6.15 | An exchange is weak, and its expected value is in thread memory.
  atomic_compare_exchange_weak_explicit(a, &o[0], 1u, memory_order_relaxed, memory_order_relaxed);  // error
  atomic_compare_exchange_strong_explicit(a, &e, 1u, memory_order_relaxed, memory_order_relaxed);  // error

// --- types | rejected (certain) | MSL 2.6 | Metal has neither atomic<half> nor atomic<ushort>.
kernel void k(device atomic<half>* x) { atomic_fetch_add_explicit(x, half(1), memory_order_relaxed); }  // error
kernel void k(device atomic<ushort>* x) {}  // error
kernel void k(device atomic<uint>* x) {}  // accepted

// --- arithmetic | rejected (certain) | MSL 6.15.4 | An atomic bool has no arithmetic, and an atomic ulong has minimum and maximum only.
  atomic_fetch_add_explicit(b, true, memory_order_relaxed);  // error
  atomic_fetch_add_explicit(l, 1, memory_order_relaxed);  // error
  atomic_exchange_explicit(b, true, memory_order_relaxed);  // accepted
  atomic_max_explicit(l, 3ul, memory_order_relaxed);  // accepted

// --- atomic_float_max | rejected (likely) | MSL 6.15.4 | atomic<float> has no maximum.
  atomic_fetch_max_explicit(f, 1.0f, memory_order_relaxed);  // error

// --- orders | rejected (likely) | MSL 2.6; MSL 6.15 | Atomic functions take memory_order_relaxed only.
  atomic_fetch_add_explicit(a, 1, memory_order_seq_cst);  // error
  n[0] = atomic_load_explicit(a, memory_order_acquire);  // error
  atomic_store_explicit(a, 1u, memory_order_release);  // error

// --- operations | accepted (certain) | MSL 2.6; MSL 6.15 | The library has the atomic operations of the specification.
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

// --- cast_of_memory | accepted (certain) | llama.cpp, MLX | A pointer to an integer can be cast to a pointer to its atomic type.
kernel void k(device uint* u [[buffer(0)]]) { atomic_fetch_add_explicit((device atomic_uint*)u, 1u, memory_order_relaxed); }

// --- found_by_arguments | accepted (certain) | C++ [basic.lookup.argdep] | Argument-dependent lookup finds the atomic functions.
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

// --- barriers | rejected (certain) | MSL 6.9.1 | A barrier takes mem_flags; the flag for no memory is mem_none.
  threadgroup_barrier();  // error
  threadgroup_barrier(1);  // error
  simdgroup_barrier(mem_flags::none);  // error
  simdgroup_barrier(mem_flags::mem_none);  // accepted
