// certain: class template argument deduction is C++17, from 4.0 on (MSL 4.0, 1.5)
#include <metal_stdlib>
using namespace metal;
template <typename T> struct S { T v; S(T a) : v(a) {} };
kernel void k(device int* x [[buffer(0)]]) {
  S s(1); // HERE
  x[0] = s.v;
}
