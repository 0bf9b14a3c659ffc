// certain: vector as if condition (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* o [[buffer(0)]]) {
  if (o[0] < o[1]) o[0] = 1;  // HERE
}
