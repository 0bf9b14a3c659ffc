// certain: member without qualifier called on a constant object (MSL specification 4, member functions qualified with an address space; MLX steel/attn)
#include <metal_stdlib>
using namespace metal;
struct P {
  float a;
  float get() const { return a; }
};
constant P p = {1.0f};
kernel void k(device float* o [[buffer(0)]]) { o[0] = p.get(); }  // HERE
