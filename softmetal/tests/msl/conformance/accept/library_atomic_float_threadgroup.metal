// certain: twin of the refused program: atomic<float> is for device memory (MSL 6.15)
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic<float>* x [[buffer(0)]]) {
  threadgroup atomic_uint a;
  atomic_store_explicit(&a, 1u, memory_order_relaxed);
  atomic_store_explicit(x, 1.0f, memory_order_relaxed);
}
