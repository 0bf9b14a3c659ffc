// certain: this in a device member points to device memory (MSL specification 4, member functions qualified with an address space; MLX steel/attn)
#include <metal_stdlib>
using namespace metal;
struct View {
  float v[4];
  thread float& at(uint i) device { return v[i]; }  // HERE
};
kernel void k(device View* b [[buffer(0)]], uint i [[thread_position_in_grid]]) { b[i].at(1) = 1; }
