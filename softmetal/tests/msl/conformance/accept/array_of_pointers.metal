// likely: array of device pointers local (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* a [[buffer(0)]], device float* b [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  device float* p[2] = {a, b};
  device float* const* q = p;
  p[i & 1][i] = q[0][1];
}
