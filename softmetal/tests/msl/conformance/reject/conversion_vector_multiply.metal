// certain: int4 * uint4 (SPIRV-Cross: cannot convert between vector values)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int4* x [[buffer(0)]], uint3 g [[thread_position_in_grid]]) {
  x[0] = x[1] * g.xyyx; // HERE
}
