// certain: a string literal is in constant memory (MSL 4.2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  const thread char* s = "ab"; // HERE
  x[0] = s[0];
}
