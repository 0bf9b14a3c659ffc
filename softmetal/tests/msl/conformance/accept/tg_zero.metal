// likely: a threadgroup variable initialised with zero (public sources; the memory is undefined all the same)
#include <metal_stdlib>
using namespace metal;
template <typename T>
kernel void k(device T* o [[buffer(0)]], ushort i [[thread_index_in_threadgroup]]) {
  threadgroup float x = 0.0f;
  threadgroup uint a = 0, b[2] = {0, 0}, c = 0u;
  threadgroup float4 v = float4(0.0f);
  threadgroup T t = T(0);
  threadgroup half h[4]{};
  threadgroup bool any = false;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 0) x = 1, a = b[1] = c = 2, v = 3, t = 4, h[0] = 5, any = true;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = T(x + a + b[1] + c + v.x) + t + T(h[0]) + T(any);
}
template [[host_name("k_float")]] kernel void k<float>(device float*, ushort);
