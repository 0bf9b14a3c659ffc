// certain: twin of the refused program: a device pointer is not assigned to a thread pointer (MSL 4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  float y = 0, z = 1;
  thread float* p = &y;
  p = &z;
  x[0] = *p;
}
