// certain: twin of the refused program: a conditional of two address spaces is a copy: no place to write to (C++ [expr.cond])
#include <metal_stdlib>
using namespace metal;
struct P { float a; };
kernel void k(device float* x [[buffer(0)]], device float4* u [[buffer(1)]], device P* q [[buffer(2)]], constant int& n [[buffer(3)]]) {
  float a = 1, b = 2;
  float4 v = 1;
  P p{1};
  threadgroup float s;
  if (n == 4) s = v.y;
  (n > 0 ? a : b)++;
  x[1] = a + b + p.a;
}
