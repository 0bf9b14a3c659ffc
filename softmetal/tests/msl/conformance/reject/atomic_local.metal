// certain: atomic in thread memory (MSL specification 2.6, 6.15, atomics)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* o [[buffer(0)]]) {
  atomic_uint a;
  atomic_store_explicit(&a, 1u, memory_order_relaxed);  // HERE
  o[0] = 1;
}
