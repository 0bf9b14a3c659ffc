// likely: elements of a const fragment by value; references to copies
#include <metal_stdlib>
using namespace metal;
float f(const simdgroup_float8x8 m) { const float x = m.thread_elements()[0]; return x + m.thread_elements()[1]; }
float g(float x) { return x; }
kernel void k(device float* o [[buffer(0)]]) {
  simdgroup_float8x8 m(1.0f);
  const simdgroup_float8x8 n = m;
  thread auto& e = m.thread_elements();
  e[0] = 2;
  m.thread_elements()[1] += 1;
  o[0] = f(n) + g(n.thread_elements()[0]);
}
