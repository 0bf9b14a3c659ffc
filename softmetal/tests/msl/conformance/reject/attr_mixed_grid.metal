// certain: scalars and vectors of grid attributes mixed in one kernel (MSL specification 5.2.3, attributes of compute functions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]],
              uint3 n [[threads_per_threadgroup]]) {  // HERE
  o[i] = n.x;
}
