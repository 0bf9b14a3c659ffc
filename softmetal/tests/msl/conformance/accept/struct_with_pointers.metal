// certain: struct with device pointers in thread memory (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
struct Loader {
  const device half* src;
  threadgroup half* dst;
  const int ld;
  short n;
  Loader(const device half* s, threadgroup half* d, int l) : src(s), dst(d), ld(l), n(0) {}
  void load() {
    dst[n] = src[n * ld];
    n++;
  }
  void next() thread { src += ld; }
};
kernel void k(const device half* a [[buffer(0)]], device half* o [[buffer(1)]],
              uint i [[thread_index_in_threadgroup]]) {
  threadgroup half t[64];
  Loader l(a, t, 4);
  l.load();
  l.next();
  o[i] = t[0];
}
