// certain: simd_shuffle of a pointer (MSL table 6.14)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  x[0] = simd_shuffle(x, 1)[0]; // HERE
}
