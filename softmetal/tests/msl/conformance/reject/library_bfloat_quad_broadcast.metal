// likely: quad_broadcast of bfloat (MSL specification 6.9.2, table 6.14)
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* o [[buffer(0)]], ushort i [[thread_index_in_simdgroup]]) {
  o[i] = quad_broadcast(o[i], ushort(1));  // HERE
}
