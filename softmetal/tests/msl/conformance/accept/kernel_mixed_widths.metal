// certain: twin of the refused program: either all scalar types or all vector types with the same number of elements (triton-msl #10)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]], 
    uint3 p [[threadgroup_position_in_grid]],
    uint3 l [[thread_position_in_threadgroup]]) {
  x[p.x] = l.x;
}
