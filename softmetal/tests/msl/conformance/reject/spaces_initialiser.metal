// certain: a threadgroup pointer initialises no thread pointer (MSL 4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  thread float* p = t; // HERE
  x[0] = *p;
}
