// certain: struct member qualified with a space (MSL specification 4, member functions qualified with an address space; MLX steel/attn)
#include <metal_stdlib>
using namespace metal;
struct S {
  device float x;  // HERE
};
kernel void k(device float* o [[buffer(0)]]) { o[0] = 1; }
