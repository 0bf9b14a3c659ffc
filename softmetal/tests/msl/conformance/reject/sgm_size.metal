// certain: simdgroup matrix other than 8x8 (MSL specification 2.3.2, 6.7, simdgroup matrices; llama.cpp, MLX steel)
#include <metal_stdlib>
using namespace metal;
#include <metal_simdgroup_matrix>
kernel void k(device float* o [[buffer(0)]]) {
  simdgroup_matrix<float, 16, 16> c;  // HERE
  simdgroup_store(c, o, 16);
}
