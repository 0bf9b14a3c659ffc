// likely: twin of the refused program: simd_max of 64 bits (MSL table 6.13; MLX goes through uint2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]]) {
  x[0] = simd_max(x[1]);
}
