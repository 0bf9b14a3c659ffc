// certain: memory cast to an atomic (llama.cpp, MLX)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* u [[buffer(0)]]) { atomic_fetch_add_explicit((device atomic_uint*)u, 1u, memory_order_relaxed); }
