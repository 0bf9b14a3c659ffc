// certain: simdgroup_load from thread memory (MSL specification 2.3.2, 6.7, simdgroup matrices; llama.cpp, MLX steel)
#include <metal_stdlib>
using namespace metal;
#include <metal_simdgroup_matrix>
kernel void k(device float* o [[buffer(0)]]) {
  float a[64];
  simdgroup_float8x8 c;
  simdgroup_load(c, a, 8);  // HERE
  simdgroup_store(c, o, 8);
}
