// likely: atomic_fetch_max on float
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic<float>* x [[buffer(0)]]) { atomic_fetch_max_explicit(x, 1.0f, memory_order_relaxed); }  // HERE
