// likely: extern variables in a function
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* o [[buffer(0)]]) {
  extern constant int n;  // HERE
  o[0] = n; }
