// certain: twin of the refused program: a conditional of two address spaces is a copy: no place to write to (C++ [expr.cond])
#include <metal_stdlib>
using namespace metal;
template <typename T> void f(device T* x, int n) {
  (n > 0 ? x[0] : x[1]) += n > 0 ? x[2] : T(3);
}
kernel void k(device float* x [[buffer(0)]], constant int& n [[buffer(1)]]) { f(x, n); }
