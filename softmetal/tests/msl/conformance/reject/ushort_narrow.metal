// certain: narrowing in braces (MSL specification 2.1, 2.18, scalars and their conversions)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* n [[buffer(0)]]) {
  short s{n[0]};  // HERE
  n[1] = s;
}
