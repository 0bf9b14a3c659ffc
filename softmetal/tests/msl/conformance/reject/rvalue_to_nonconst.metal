// certain: non-const reference to a temporary (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
void f(thread float& a) { a = 1; }
kernel void k(device float* o [[buffer(0)]]) {
  f(2.0f);  // HERE
  o[0] = 1;
}
