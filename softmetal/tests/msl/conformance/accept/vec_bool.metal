// certain: vec<bool, N> spelled out is boolN (MSL specification 2.2, vectors)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], device const vec<bool, 4>* x [[buffer(1)]]) {
  vec<bool, 2> w(true, false);
  vec<bool, 4> v = x[0];
  bool4 b = v;
  o[0] = (w.x ? 1 : 0) + (b.y ? 1 : 0) + select(1.0f, 2.0f, w.y);
}
