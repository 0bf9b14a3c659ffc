// certain: cast between spaces (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  threadgroup float t[4];
  t[0] = 1;
  threadgroup float* p = (threadgroup float*)o;  // HERE
  o[1] = p[0] + t[0];
}
