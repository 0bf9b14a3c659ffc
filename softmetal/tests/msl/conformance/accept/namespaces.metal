// certain: namespaces, using, typedef (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
namespace a {
namespace b {
constant int x = 1;
inline float f(float y) { return y; }
}  // namespace b
namespace c = b;
using namespace b;
typedef half4 h4;
using F = float;
}  // namespace a
namespace m = metal;
using m::max;
kernel void k(device float* o [[buffer(0)]]) {
  a::h4 h = 1;
  a::F f = a::c::f(2) + a::x;
  o[0] = max(f, float(h.x)) + metal::fmax(1.0f, 2.0f) + metal::precise::exp(1.0f) + fast::log(2.0f);
}
