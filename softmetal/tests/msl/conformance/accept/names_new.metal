// certain: twin of the refused program: 'new' is not supported in Metal (naga #264)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  float3 fresh = float3(1);
  x[0] = fresh.x;
}
