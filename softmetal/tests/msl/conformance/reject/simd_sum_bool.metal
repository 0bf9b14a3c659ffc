// certain: simd_sum of bool (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], ushort l [[thread_index_in_simdgroup]]) {
  o[0] = simd_sum(l > 1);  // HERE
}
