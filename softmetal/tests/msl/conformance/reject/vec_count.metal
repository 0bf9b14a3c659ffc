// certain: vector constructor with too few components (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* o [[buffer(0)]]) {
  float2 a = 1;
  o[0] = float4(a, 1);  // HERE
}
