// likely: twin of the refused program: a float in braces is no bfloat (MSL 2.1)
#include <metal_stdlib>
using namespace metal;
struct S { bfloat a; };
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  S s = {bfloat(x[0])};
  x[1] = s.a;
}
