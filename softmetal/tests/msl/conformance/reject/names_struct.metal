// certain: a keyword cannot name a type (MSL 5.1)
#include <metal_stdlib>
using namespace metal;
struct kernel { // HERE
  float a;
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = 1; }
