// certain: overloads that return references in their own spaces (MSL specification 4, member functions qualified with an address space; MLX steel/attn)
#include <metal_stdlib>
using namespace metal;
template <typename T>
struct Tile {
  T v[4];
  T w;
  METAL_FUNC thread T& at(short i) thread { return v[i]; }
  METAL_FUNC threadgroup T& at(short i) threadgroup { return v[i]; }
  const device T& at(short i) const device { return v[i]; }
  threadgroup T* data() threadgroup { return &v[0]; }
};
kernel void k(device Tile<float>* b [[buffer(0)]], device float* o [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  Tile<float> t;
  threadgroup Tile<float> s;
  t.at(0) = 1;
  s.at(0) = 2;
  device const Tile<float>& d = b[1];
  o[i] = t.at(0) + s.at(0) + s.data()[0] + d.at(2);
}
