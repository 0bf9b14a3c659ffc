// certain: simd_shuffle_and_fill of vectors (MSL specification 6.9.2, table 6.14: scalars and vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* o [[buffer(0)]], device float3* p [[buffer(1)]], device uint4* q [[buffer(2)]],
              ushort i [[thread_index_in_simdgroup]]) {
  o[i] = simd_shuffle_and_fill_up(o[i], float4(1), ushort(1));
  o[i] += simd_shuffle_and_fill_down(o[i], float4(1), ushort(2), ushort(8));
  p[i] = simd_shuffle_and_fill_down(p[i], p[i], 1);
  q[i] = simd_shuffle_and_fill_up(q[i], q[i], 3, 16);
}
