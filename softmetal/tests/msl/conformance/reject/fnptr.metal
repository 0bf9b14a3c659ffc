// certain: function pointer (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
float f(float x) { return x; }
kernel void k(device float* o [[buffer(0)]]) {
  float (*p)(float) = f;  // HERE
  o[0] = p(1);
}
