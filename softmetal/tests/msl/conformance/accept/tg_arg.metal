// certain: threadgroup argument with index (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], threadgroup float* t [[threadgroup(0)]],
              threadgroup half4* u [[threadgroup(1)]], ushort i [[thread_index_in_threadgroup]]) {
  t[i] = i;
  u[i] = half4(i);
  o[i] = t[i] + u[i].x;
}
