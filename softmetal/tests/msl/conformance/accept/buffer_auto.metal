// certain: buffers without attributes get indices (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o, constant float& s, device const float* p, uint i [[thread_position_in_grid]]) {
  o[i] = s * p[i];
}
