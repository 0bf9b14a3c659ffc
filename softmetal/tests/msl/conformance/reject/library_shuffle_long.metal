// likely: simd_shuffle_down of 64 bits (MSL table 6.14; MLX goes through uint2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device long* x [[buffer(0)]]) {
  x[0] = simd_shuffle_down(x[1], 1); // HERE
}
