// certain: barrier without flags (MSL specification 6.9.1, barriers)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  threadgroup_barrier();  // HERE
  o[0] = 1;
}
