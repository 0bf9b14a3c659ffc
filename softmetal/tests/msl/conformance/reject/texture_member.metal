// likely: a struct with a texture without a value
#include <metal_stdlib>
using namespace metal;
struct S { depth2d<float> t; int x; };
kernel void k(device float4* o [[buffer(0)]]) {
  S s;  // HERE
  o[0] = s.x; }
