// certain: a reference without an address space (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
void f(float& a) { a = 1; }  // HERE
kernel void k(device float* o [[buffer(0)]]) {
  float x;
  f(x);
  o[0] = x;
}
