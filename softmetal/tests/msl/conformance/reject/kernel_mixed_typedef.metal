// certain: the same through an alias (triton-msl #10)
#include <metal_stdlib>
using namespace metal;
using position = uint3;
kernel void k(device uint* x [[buffer(0)]], position p [[thread_position_in_grid]],
    uint n [[threads_per_grid]]) { // HERE
  x[p.x] = n;
}
