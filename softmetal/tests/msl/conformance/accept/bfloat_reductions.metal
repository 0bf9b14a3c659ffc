// likely: twin of the refused programs: a program adds overloads for bfloat (MLX, torch)
#include <metal_stdlib>
using namespace metal;
namespace metal { bfloat simd_sum(bfloat x) { return bfloat(simd_sum(float(x))); } }
kernel void k(device bfloat* x) { x[0] = simd_sum(x[1]) + bfloat(quad_prefix_inclusive_sum(float(x[2]))); }
