// likely: twin of the refused program: a parameter cannot be a function pointer (MSL 1.5.4)
#include <metal_stdlib>
using namespace metal;
float g(float a) { return a; }
template <float (*h)(float)> float f(float a) {
  return h(a);
}
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = f<g>(1); }
