// likely: at 4.1 pointers without a space are generic (MSL 4.1: the generic address space)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
float sum(const float* p, int n) {
  float s = 0;
  for (int i = 0; i < n; i++) s += p[i];
  return s;
}
void put(float& x) { x = 1; }
struct S {
  float* p;
};
kernel void k(device float* o [[buffer(0)]]) {
  float a[2] = {1, 2};
  threadgroup float t[2];
  t[0] = 1;
  t[1] = 2;
  put(a[0]);
  put(o[1]);
  S s = {o};
  o[0] = sum(o, 2) + sum(a, 2) + sum(t, 2) + s.p[0];
}
