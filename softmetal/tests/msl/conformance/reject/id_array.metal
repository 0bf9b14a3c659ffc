// likely: an [[id]] inside the range of an array
#include <metal_stdlib>
using namespace metal;
struct S { array<texture2d<float>, 4> a [[id(0)]];
  device float* b [[id(3)]]; };  // HERE
kernel void k(constant S& s [[buffer(0)]]) { s.b[0] = 1; }
