// certain: vector constructor with too many components (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* o [[buffer(0)]]) {
  float3 a = 1;
  o[0] = float4(a, 1, 2);  // HERE
}
