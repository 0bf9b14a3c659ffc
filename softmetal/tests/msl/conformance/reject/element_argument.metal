// likely: an element of a fragment as a reference argument
#include <metal_stdlib>
using namespace metal;
void f(thread float& x) { x = 1; }
kernel void k(device float* o [[buffer(0)]]) { simdgroup_float8x8 m(1.0f);
  f(m.thread_elements()[0]);  // HERE
  o[0] = 1; }
