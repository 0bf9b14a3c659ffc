// certain: char8_t (C++20)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uchar* o [[buffer(0)]]) {
  char8_t c = 1;  // HERE
  o[0] = c; }
