// likely: twin of the refused program: from 4.1 on a thread member function is not called from an unqualified one (MLX PR 3963: viral)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
struct S {
  float v;
  void set() thread { v = 1; }
  void go() thread {
    set();
  }
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { S s; s.go(); x[0] = s.v; }
