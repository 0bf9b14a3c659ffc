// likely: C++17 from metal4.0: structured bindings, if with an initialiser, deduced class arguments (MSL specification 4, what is new)
// std: metal4.0
#include <metal_stdlib>
using namespace metal;
template <typename T>
struct P {
  T a, b;
  P(T x, T y) : a(x), b(y) {}
};
kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  P p(1.0f, 2.0f);
  auto [x, y] = p;
  if (float z = x + y; z > 2) o[i] = z;
}
