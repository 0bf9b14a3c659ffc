// certain: device pointer from a threadgroup variable (MSL specification 4.4, threadgroup memory)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  threadgroup float t[4];
  t[0] = 1;
  device float* p = t;  // HERE
  o[0] = p[0];
}
