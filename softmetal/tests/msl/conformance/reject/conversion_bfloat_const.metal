// certain: const bfloat from float (cubecl #1522)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  bfloat const v = float(x[0]); // HERE
  x[1] = v;
}
