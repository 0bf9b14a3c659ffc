// likely: twin of the refused program: from 4.1 on a member is no argument for a thread reference (MLX PR 3963)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
void f(thread float& y) { y = 1; }
struct S {
  float v;
  void set() thread {
    f(v);
  }
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { S s; s.set(); x[0] = s.v; }
