// certain: device variable in a helper (MSL specification 4.4, threadgroup memory)
#include <metal_stdlib>
using namespace metal;
void f() {
  device float x;  // HERE
  x = 1;
}
kernel void k(device float* o [[buffer(0)]]) {
  f();
  o[0] = 1;
}
