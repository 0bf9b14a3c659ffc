// certain: type keyword as a name (MSL specification, keywords; crosstl #1140)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  float half = 1;  // HERE
  o[0] = half;
}
