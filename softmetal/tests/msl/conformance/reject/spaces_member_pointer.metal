// certain: a device pointer is no thread member (MSL 4)
#include <metal_stdlib>
using namespace metal;
struct S { thread float* p; };
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  S s;
  s.p = x; // HERE
  s.p[0] = 1;
}
