// likely: assignments, initialisers and results of generic pointers (MSL 4.1: the generic address space)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
struct S {
  float* p;
  int n;
};
float* pick(float* a, float* b, bool c) { return c ? a : b; }
float* first(device float* a) { return a; }
kernel void k(device float* o [[buffer(0)]]) {
  float a[2] = {1, 2};
  float* p = a;
  p = o;
  S s;
  s.p = o;
  S t = {a, 1};
  thread float* q = a;
  o[0] = *pick(p, s.p, true) + *first(o) + t.p[0] + q[1];
  const auto& r = o[1];
  o[2] = r;
}
