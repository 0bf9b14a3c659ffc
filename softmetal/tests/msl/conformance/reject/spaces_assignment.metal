// certain: a device pointer is not assigned to a thread pointer (MSL 4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  float y = 0;
  thread float* p = &y;
  p = x; // HERE
  *p = 1;
}
