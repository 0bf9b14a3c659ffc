// likely: a reference to an element of a const fragment
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) { simdgroup_float8x8 m(1.0f); const simdgroup_float8x8 n = m;
  thread const float& e = n.thread_elements()[0];  // HERE
  o[0] = e; }
