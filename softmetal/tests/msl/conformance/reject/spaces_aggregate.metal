// certain: a threadgroup pointer initialises no thread member (MSL 4)
#include <metal_stdlib>
using namespace metal;
struct S { thread float* p; };
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  S s = {t}; // HERE
  x[0] = s.p[0];
}
