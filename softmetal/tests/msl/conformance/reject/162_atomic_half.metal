// certain: atomic<half>
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic<half>* x [[buffer(0)]]) { atomic_fetch_add_explicit(x, half(1), memory_order_relaxed); }  // HERE
