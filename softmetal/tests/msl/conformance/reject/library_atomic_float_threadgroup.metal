// certain: atomic<float> is for device memory (MSL 6.15)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup atomic<float> a;
  atomic_store_explicit(&a, 1.0f, memory_order_relaxed); // HERE
  x[0] = 1;
}
