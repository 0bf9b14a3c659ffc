// certain: twin of the refused program: a cast to a pointer needs an address space (hashcat #4237)
#include <metal_stdlib>
using namespace metal;
typedef uint u32;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  float y[4];
  x[0] = *(thread u32 *)y;
}
