// certain: a variable hides the function of its name (SPIRV-Cross #486)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  float dot = dot(float2(1), float2(2)); // HERE
  x[0] = dot;
}
