// likely: thread pointer to device pointer (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
void advance(thread device float*& p, uint n) { p += n; }
void advance2(device float* thread& p, uint n) { p += n; }
void advance3(device float* thread* p, uint n) { *p += n; }
kernel void k(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  advance2(a, i);
  advance3(&a, 1);
  *a = 1;
}
