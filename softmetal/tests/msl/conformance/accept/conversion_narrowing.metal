// certain: twin of the refused program: int to uint in braces narrows (C++14 dcl.init.list)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) {
  uint y{uint(x[0])};
  x[1] = y;
}
