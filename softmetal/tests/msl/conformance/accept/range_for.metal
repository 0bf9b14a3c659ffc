// likely: range for over a local array (MSL specification 1.5: C++14)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  float a[3] = {1, 2, 3};
  float s = 0;
  for (float x : a) s += x;
  o[0] = s;
}
