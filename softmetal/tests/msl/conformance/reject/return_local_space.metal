// certain: local variable in device space (MSL specification 4.4, threadgroup memory)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  device float x = 1;  // HERE
  o[0] = x;
}
