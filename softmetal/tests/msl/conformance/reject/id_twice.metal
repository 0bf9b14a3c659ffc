// certain: one [[id]] twice in an argument buffer
#include <metal_stdlib>
using namespace metal;
struct S { device float* a [[id(1)]];
  device float* b [[id(1)]]; };  // HERE
kernel void k(constant S& s [[buffer(0)]]) { s.a[0] = s.b[0]; }
