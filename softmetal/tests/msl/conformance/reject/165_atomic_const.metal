// certain: atomic store through const device
#include <metal_stdlib>
using namespace metal;
kernel void k(const device atomic_int* x [[buffer(0)]]) { atomic_store_explicit(x, 1, memory_order_relaxed); }  // HERE
