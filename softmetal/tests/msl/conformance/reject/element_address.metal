// likely: the address of an element of a fragment
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) { simdgroup_float8x8 m(1.0f);
  thread float* p = &m.thread_elements()[1];  // HERE
  o[0] = *p; }
