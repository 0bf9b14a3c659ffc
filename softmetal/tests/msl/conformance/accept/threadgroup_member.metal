// certain: threadgroup qualified member (MSL specification 4, member functions qualified with an address space; MLX steel/attn)
#include <metal_stdlib>
using namespace metal;
struct Tile {
  float v[32];
  void put(ushort i, float x) threadgroup { v[i] = x; }
  float get(ushort i) const threadgroup { return v[i]; }
  threadgroup float* data() threadgroup { return v; }
  threadgroup Tile* self() threadgroup { return this; }
};
kernel void k(device float* o [[buffer(0)]], ushort i [[thread_index_in_threadgroup]]) {
  threadgroup Tile t;
  t.put(i, 1);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* p = t.self()->data();
  o[i] = t.get(i) + p[0];
}
