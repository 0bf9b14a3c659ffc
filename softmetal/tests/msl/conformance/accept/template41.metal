// likely: templates with generic references (MSL 4.1: the generic address space)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
template <typename T>
T twice(const T& x) {
  return x * 2;
}
template <typename T>
void bump(T* x) {
  *x += 1;
}
kernel void k(device float* o [[buffer(0)]]) {
  float a = 1;
  bump(&a);
  bump(o);
  o[1] = twice(a) + twice(o[2]);
}
