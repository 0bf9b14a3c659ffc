// certain: a keyword cannot name a member (SPIRV-Cross #2073)
#include <metal_stdlib>
using namespace metal;
struct S {
  float thread; // HERE
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = 1; }
