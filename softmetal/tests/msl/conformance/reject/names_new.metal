// certain: 'new' is not supported in Metal (naga #264)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  float3 new = float3(1); // HERE
  x[0] = 1;
}
