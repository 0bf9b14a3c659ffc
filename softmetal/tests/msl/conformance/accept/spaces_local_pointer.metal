// certain: twin of the refused program: pointer type must have explicit address space qualifier (slang #4129)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  float device* y = x + 1;
  *y = 2;
}
