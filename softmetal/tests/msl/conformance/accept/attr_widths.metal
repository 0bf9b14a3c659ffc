// certain: grid attributes as ushort, ushort2, ushort3 (MSL specification 5.2.3, attributes of compute functions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], ushort3 a [[thread_position_in_threadgroup]],
              ushort3 b [[threads_per_threadgroup]], ushort3 g [[threadgroup_position_in_grid]],
              ushort l [[thread_index_in_simdgroup]], ushort s [[simdgroup_index_in_threadgroup]],
              ushort w [[threads_per_simdgroup]], ushort n [[simdgroups_per_threadgroup]],
              ushort q [[quadgroup_index_in_threadgroup]], ushort ql [[thread_index_in_quadgroup]]) {
  o[a.x] = b.x + g.x + l + s + w + n + q + ql;
}
