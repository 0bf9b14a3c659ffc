// certain: references of each space (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
void f(thread float& a, device float& b, threadgroup float& c, constant float& d) { b = a + c + d; }
kernel void k(device float* o [[buffer(0)]], constant float& s [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  threadgroup float t;
  t = 1;
  float a = 2;
  f(a, o[i], t, s);
}
