// certain: threadgroup arrays, structs, aligned, in a nested scope (MSL specification 4.4, threadgroup memory)
#include <metal_stdlib>
using namespace metal;
struct alignas(16) Sh {
  float a[4];
  int n;
};
template <typename T, int N>
void fill(threadgroup T (&t)[N], ushort i) {
  if (i < N) t[i] = T(i);
}
kernel void k(device float* o [[buffer(0)]], ushort i [[thread_index_in_threadgroup]]) {
  threadgroup float a[2][32], b[16];
  alignas(16) threadgroup char raw[64];
  threadgroup Sh s;
  fill(b, i);
  a[1][i] = i;
  s.n = 1;
  raw[i] = 1;
  for (int j = 0; j < 2; j++) {
    threadgroup float c[8];
    c[j] = 1;
    o[i] = c[j];
  }
  threadgroup float* p = (threadgroup float*)raw;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] += a[1][i] + b[0] + p[0] + s.n;
}
