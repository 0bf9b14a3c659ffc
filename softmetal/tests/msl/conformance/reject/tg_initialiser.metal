// likely: a threadgroup variable initialised with another value than zero
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  threadgroup float a = 0, b = 2;  // HERE
  o[0] = a + b; }
