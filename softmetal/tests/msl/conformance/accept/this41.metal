// likely: an unqualified member at 4.1 gives out generic references and pointers to members (MSL 4.1: the generic address space)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
struct S {
  float v[4];
  float& at(int i) { return v[i]; }
  float* data() { return v; }
};
kernel void k(device float* o [[buffer(0)]]) {
  S s;
  s.at(1) = 2;
  o[0] = s.data()[1];
}
