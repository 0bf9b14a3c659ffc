// certain: torch 2.15 ships it (c10/metal/common.h): a namespace may have a type of a name of metal_types
#include <metal_stdlib>
using namespace metal;
namespace numbers {
template <typename T>
using complex = ::metal::vec<T, 2>;
struct quad { float a, b, c, d; };
}  // namespace numbers
kernel void k(device float* x [[buffer(0)]]) {
  numbers::complex<float> z = float2(1.0f, 2.0f);
  numbers::quad q = {z.x, z.y, 0, 0};
  x[0] = q.a + q.b;
}
