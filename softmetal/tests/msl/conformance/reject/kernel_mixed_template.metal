// certain: the same in a template (triton-msl #10)
#include <metal_stdlib>
using namespace metal;
template <typename T> kernel void f(device uint* x [[buffer(0)]], T p [[thread_position_in_grid]],
    uint n [[threads_per_grid]]) { // HERE
  x[0] = n;
}
template [[host_name("f")]] kernel void f<uint2>(device uint*, uint2, uint);
