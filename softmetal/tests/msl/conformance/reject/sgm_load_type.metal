// certain: simdgroup_load from another element type (MSL specification 2.3.2, 6.7, simdgroup matrices; llama.cpp, MLX steel)
#include <metal_stdlib>
using namespace metal;
#include <metal_simdgroup_matrix>
kernel void k(device half* o [[buffer(0)]]) {
  simdgroup_float8x8 c;
  simdgroup_load(c, o, 8);  // HERE
}
