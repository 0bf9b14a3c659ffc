// certain: literal suffixes (MSL specification 2.1, 2.18, scalars and their conversions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  half h = 1.0h;
  half g = 2.H;
  float f = 1.5f;
  bfloat b = 1.0bf;
  uint u = 3u;
  long l = 4l;
  ulong m = 5ul;
  o[0] = 0x1.8p3 + h + g + f + float(b) + u + l + m + 1e-3 + .5 + 0b101 + 'a';
}
