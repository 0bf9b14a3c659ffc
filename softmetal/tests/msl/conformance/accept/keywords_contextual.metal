// likely: names of library functions and attributes can name variables (MSL specification, keywords; crosstl #1140)
#include <metal_stdlib>
using namespace metal;
float square(float dot) { return dot * dot; }
kernel void k(device float* o, uint i [[thread_position_in_grid]]) {
  float max = 2, length = 3, sample = 1, buffer = 1, texture = 2, stage_in = 1;
  o[i] = square(max) + length + sample + buffer + texture + stage_in;
}
