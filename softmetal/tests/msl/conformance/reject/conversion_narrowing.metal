// certain: int to uint in braces narrows (C++14 dcl.init.list)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) {
  uint y{x[0]}; // HERE
  x[1] = y;
}
