// likely: bit fields are allowed (MSL specification 1.5: C++14)
#include <metal_stdlib>
using namespace metal;
struct B {
  uint a : 4;
  uint b : 28;
};
kernel void k(device uint* o [[buffer(0)]]) {
  B b;
  b.a = 3;
  b.b = 4;
  o[0] = b.a + b.b;
}
