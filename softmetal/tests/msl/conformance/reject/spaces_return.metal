// certain: a function cannot return device memory as a thread reference (MSL 4)
#include <metal_stdlib>
using namespace metal;
thread float& f(device float* p) {
  return p[1]; // HERE
}
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { f(x) = 1; }
