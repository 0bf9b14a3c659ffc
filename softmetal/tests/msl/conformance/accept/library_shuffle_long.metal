// likely: twin of the refused program: simd_shuffle_down of 64 bits (MSL table 6.14; MLX goes through uint2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device long* x [[buffer(0)]]) {
  x[0] = as_type<long>(simd_shuffle_down(as_type<uint2>(x[1]), 1));
}
