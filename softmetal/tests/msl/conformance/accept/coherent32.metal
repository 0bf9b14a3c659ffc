// certain: coherent(device) buffers from 3.2 (MSL specification 3.2, what is new)
// std: metal3.2
#include <metal_stdlib>
using namespace metal;
kernel void k(volatile coherent(device) device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  o[i] = 1;
}
