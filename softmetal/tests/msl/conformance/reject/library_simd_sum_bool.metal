// likely: simd_sum of bool (MSL table 6.13)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) {
  x[0] = simd_sum(x[1] > 2); // HERE
}
