// certain: threadgroup variable with an initialiser (MSL specification 4.4, threadgroup memory)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  threadgroup float t = 1.0f;  // HERE
  o[0] = t;
}
