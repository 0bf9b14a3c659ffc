// likely: simd_shuffle of bfloat2
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat2* o [[buffer(0)]], ushort i [[thread_index_in_simdgroup]]) {
  o[i] = simd_shuffle(o[i], ushort(1));  // HERE
}
