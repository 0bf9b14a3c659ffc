// certain: simd_and is for integers (MSL table 6.13)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  x[0] = simd_and(x[1]); // HERE
}
