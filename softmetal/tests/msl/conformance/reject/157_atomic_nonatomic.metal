// certain: atomic function on a plain int
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { atomic_fetch_add_explicit(x, 1, memory_order_relaxed); }  // HERE
