// certain: metal::array (MSL specification 1.5: C++14)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  array<float, 4> a = {1, 2, 3, 4};
  thread auto& b = a;
  b[1] = 3;
  o[0] = a[0] + a.size();
  array<half4, 2> c;
  c[0] = 1;
  o[1] = c[0].x;
}
