// certain: keyword vertex as a name (MSL specification, keywords; crosstl #1140)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  float vertex = 1;  // HERE
  o[0] = vertex;
}
