// certain: twin of the refused program: a float is not returned as bfloat (cubecl #1522)
#include <metal_stdlib>
using namespace metal;
bfloat f(float a) {
  return static_cast<bfloat>(a);
}
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = f(x[1]); }
