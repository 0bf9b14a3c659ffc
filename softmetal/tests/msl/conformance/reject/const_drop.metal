// certain: const dropped (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
kernel void k(device const float* o [[buffer(0)]]) {
  device float* p = o;  // HERE
  p[0] = 1;
}
