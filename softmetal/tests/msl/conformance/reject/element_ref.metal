// likely: a reference to an element of a fragment (clang: references cannot bind to vector elements)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) { simdgroup_float8x8 m(1.0f);
  thread float& e = m.thread_elements()[0];  // HERE
  o[0] = e; }
