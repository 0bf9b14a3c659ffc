// certain: static local without constant (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  static int n = 0;  // HERE
  n++;
  o[0] = n;
}
