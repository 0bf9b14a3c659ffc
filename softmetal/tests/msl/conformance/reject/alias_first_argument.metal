// certain: one of two template arguments that is a pointer without address space
#include <metal_stdlib>
using namespace metal;
template <typename T, typename U> struct S { int x; };
kernel void k(device float* o [[buffer(0)]]) {
  S<float*, int> s;  // HERE
  o[0] = s.x; }
