// certain: T of thread T* is not deduced as device float (MSL 4.; 1.5.2 templates)
#include <metal_stdlib>
using namespace metal;
template <typename T> void f(thread T* p) { p[0] = 1; }
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  f(x); // HERE
}
