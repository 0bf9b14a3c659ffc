// certain: aliases of pointers with an address space, and products that look like them
#include <metal_stdlib>
using namespace metal;
using P = device float*;
typedef const constant int* Q;
template <typename T = threadgroup float*, typename U = int> struct S { T p; U u; };
template <typename T> using R = thread T&;
float f(R<float> x, device float*, int = 2) { return x; }
kernel void k(P o [[buffer(0)]], Q q [[buffer(1)]]) {
  float y = 2;
  int half_ = 3;
  int z = half_ * q[0];
  S<device float*, int> s = {o, z};
  o[0] = f(y, s.p) * z;
}
