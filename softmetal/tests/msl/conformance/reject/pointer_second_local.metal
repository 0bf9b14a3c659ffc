// likely: every pointer names its address space (MSL 4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x) {
  float a = 1, *p = &a;  // HERE
  x[0] = *p;
}
