// certain: twin of the refused program: as_type needs the same size (MSL 2.18)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* x [[buffer(0)]], device uint2* y [[buffer(1)]]) {
  y[0] = as_type<uint2>(x[0].xy);
}
