// certain: twin of the refused program: a threadgroup pointer initialises no thread pointer (MSL 4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  threadgroup float* p = t;
  x[0] = *p;
}
