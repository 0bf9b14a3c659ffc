// certain: operator() without `threadgroup` is not called on threadgroup memory (MSL 4)
#include <metal_stdlib>
using namespace metal;
struct S { float a; float operator()(float b) const { return a * b; } };
kernel void k(device float* x [[buffer(0)]], threadgroup S& s [[threadgroup(0)]]) {
  x[0] = s(2.0f); // HERE
}
