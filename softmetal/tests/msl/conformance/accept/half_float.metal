// certain: half and float mix implicitly (MSL specification 2.1, 2.18, scalars and their conversions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device half* o [[buffer(0)]], device float* x [[buffer(1)]]) {
  o[0] = x[0];
  x[1] = o[1] * 2.0;
  half h = x[2] + o[2];
  h *= x[3];
  h += 1;
  o[3] = h;
  o[4] = 1;
  o[5] = x[4] > 0 ? h : 0.0h;
  int n = o[1];
  o[6] = n;
}
