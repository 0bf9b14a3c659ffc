// likely: twin of the refused program: the same inside a template (cubecl #1522)
#include <metal_stdlib>
using namespace metal;
template <typename T> void f(device T* p, float v) {
  p[0] = T(v);
}
kernel void k(device bfloat* x [[buffer(0)]]) { f(x, 1.0f); }
