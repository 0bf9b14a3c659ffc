// certain: member function qualified device returns device reference of a member (MSL specification 4, member functions qualified with an address space; MLX steel/attn)
#include <metal_stdlib>
using namespace metal;
template <typename T>
struct View {
  T v[4];
  device T& at(uint i) device { return v[i]; }
  const device T& at(uint i) const device { return v[i]; }
};
kernel void k(device View<float>* b [[buffer(0)]], device const View<float>* c [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  b[i].at(1) = c[i].at(2);
}
