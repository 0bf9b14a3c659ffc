// certain: expected value in device memory (MSL specification 2.6, 6.15, atomics)
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic_uint* a [[buffer(0)]], device uint* o [[buffer(1)]]) {
  atomic_compare_exchange_weak_explicit(a, &o[0], 1u, memory_order_relaxed, memory_order_relaxed);  // HERE
}
