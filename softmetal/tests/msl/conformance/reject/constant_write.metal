// certain: writing a program constant (MSL specification 4.3, constant memory)
#include <metal_stdlib>
using namespace metal;
constant float a[2] = {1, 2};
kernel void k(device float* o [[buffer(0)]]) {
  a[0] = 1;  // HERE
  o[0] = a[0];
}
