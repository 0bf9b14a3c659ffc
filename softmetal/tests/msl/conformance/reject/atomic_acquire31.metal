// certain: memory_order_acquire before 3.2 (MSL specification 2.6, 6.15, atomics)
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic_uint* a [[buffer(0)]]) { atomic_store_explicit(a, 1u, memory_order_release); }  // HERE
