// certain: program-scope threadgroup variable (MSL specification 4.4, threadgroup memory)
#include <metal_stdlib>
using namespace metal;
threadgroup float t[32];  // HERE
kernel void k(device float* o [[buffer(0)]]) {
  t[0] = 1;
  o[0] = t[0];
}
