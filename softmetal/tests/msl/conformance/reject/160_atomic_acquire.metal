// likely: memory_order_acquire does not exist in 3.1
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic_int* x [[buffer(0)]], device int* y [[buffer(1)]]) { y[0]=atomic_load_explicit(x, memory_order_acquire); }  // HERE
