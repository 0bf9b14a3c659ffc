// certain: twin of the refused program: an atomic bool is not added to (MSL 6.15.4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic_bool* x [[buffer(0)]]) {
  atomic_exchange_explicit(x, true, memory_order_relaxed);
}
