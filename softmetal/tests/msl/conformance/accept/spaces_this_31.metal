// certain: before 4.1 `this` of an unqualified member function is thread (MLX PR 3963)
#include <metal_stdlib>
using namespace metal;
struct S {
  float v[4];
  thread float& at(int i) {
    return v[i];
  }
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { S s; s.at(0) = 1; x[0] = s.at(0); }
