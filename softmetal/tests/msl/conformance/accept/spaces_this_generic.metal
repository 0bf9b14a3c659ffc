// likely: twin of the refused program: from 4.1 on a member does not bind to a thread reference in an unqualified member function (MLX PR 3963)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
struct S {
  float v[4];
  thread float& at(int i) thread {
    return v[i];
  }
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { S s; s.at(0) = 1; x[0] = s.at(0); }
