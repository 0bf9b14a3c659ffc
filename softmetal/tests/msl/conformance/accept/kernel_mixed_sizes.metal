// certain: twin of the refused program: vectors of the same number of elements (triton-msl #10)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]], uint2 p [[thread_position_in_grid]],
    ushort2 n [[threads_per_grid]], uint lane [[thread_index_in_simdgroup]]) {
  x[p.x] = n.x + lane;
}
