// certain: twin of the refused program: an atomic ulong has minimum and maximum only (MSL 6.15.4.6)
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic_uint* x [[buffer(0)]]) {
  atomic_fetch_add_explicit(x, 1, memory_order_relaxed);
  atomic_max_explicit((device atomic_ulong*)x, 3ul, memory_order_relaxed);
}
