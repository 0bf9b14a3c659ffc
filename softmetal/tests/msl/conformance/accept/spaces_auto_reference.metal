// certain: twin of the refused program: thread auto& does not bind to device memory (MSL 4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  device auto& y = x[0];
  y = 1;
}
