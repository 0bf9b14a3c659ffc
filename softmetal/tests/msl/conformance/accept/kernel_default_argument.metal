// likely: twin of the refused program: a kernel has no default arguments (MSL 5.1)
#include <metal_stdlib>
using namespace metal;
uint f(uint i = 0) { return i; }
kernel void k(device uint* x [[buffer(0)]],
    uint i [[thread_position_in_grid]]) {
  x[i] = f();
}
