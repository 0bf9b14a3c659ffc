// certain: a thread pointer takes no device address at 4.1 (MSL 4.1: the generic address space)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  thread float* p = o;  // HERE
  p[0] = 1;
}
