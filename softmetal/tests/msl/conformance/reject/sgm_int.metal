// certain: simdgroup matrix of int (MSL specification 2.3.2, 6.7, simdgroup matrices; llama.cpp, MLX steel)
#include <metal_stdlib>
using namespace metal;
#include <metal_simdgroup_matrix>
kernel void k(device float* o [[buffer(0)]]) {
  simdgroup_matrix<int, 8, 8> c;  // HERE
  (void)c;
  o[0] = 1;
}
