// certain: twin of the refused program: a threadgroup pointer initialises no thread member (MSL 4)
#include <metal_stdlib>
using namespace metal;
struct S { threadgroup float* p; };
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  S s = {t};
  x[0] = s.p[0];
}
