// certain: twin of the refused program: the same through an alias (triton-msl #10)
#include <metal_stdlib>
using namespace metal;
using position = uint;
kernel void k(device uint* x [[buffer(0)]], position p [[thread_position_in_grid]],
    uint n [[threads_per_grid]]) {
  x[p] = n;
}
