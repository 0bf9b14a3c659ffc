// likely: memory_order_seq_cst does not exist before 3.2
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic_int* x [[buffer(0)]]) { atomic_fetch_add_explicit(x, 1, memory_order_seq_cst); }  // HERE
