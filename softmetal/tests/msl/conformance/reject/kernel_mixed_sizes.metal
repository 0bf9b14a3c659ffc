// certain: vectors of the same number of elements (triton-msl #10)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]], uint2 p [[thread_position_in_grid]],
    ushort3 n [[threads_per_grid]]) { // HERE
  x[p.x] = n.x;
}
