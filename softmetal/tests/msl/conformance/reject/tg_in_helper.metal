// certain: threadgroup variable in a function that is not a kernel (MSL specification 4.4, threadgroup memory)
#include <metal_stdlib>
using namespace metal;
float helper(float x) {
  threadgroup float t[32];  // HERE
  t[0] = x;
  return t[0];
}
kernel void k(device float* o [[buffer(0)]]) { o[0] = helper(1); }
