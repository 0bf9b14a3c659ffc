// certain: bfloat with bfloat, integers and comparisons (MSL 2.1)
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* x [[buffer(0)]], device float* y [[buffer(1)]]) {
  bfloat a = x[0] * x[1] + x[2];
  a += x[3];
  x[4] = a > x[5] ? a : x[5];
  y[0] = a + 1.0f;
}
