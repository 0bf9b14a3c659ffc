// certain: whole structs are copied between address spaces (MSL 4)
#include <metal_stdlib>
using namespace metal;
struct S { float a[4]; };
void f(S s, device float* x) { x[0] = s.a[0]; }
kernel void k(device S* d [[buffer(0)]], constant S& c [[buffer(1)]], device float* x [[buffer(2)]]) {
  threadgroup S t;
  t = c;
  S s = t;
  s = d[1];
  d[0] = s;
  f(c, x);
}
