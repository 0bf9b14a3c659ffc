// certain: compare_exchange_strong does not exist (MSL specification 2.6, 6.15, atomics)
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic_uint* a [[buffer(0)]]) {
  uint e = 1;
  atomic_compare_exchange_strong_explicit(a, &e, 1u, memory_order_relaxed, memory_order_relaxed);  // HERE
}
