// certain: `device` is a keyword (MSL 4, 5.1; SPIRV-Cross #2073)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  float device = x[0]; // HERE
  x[1] = device;
}
