// likely: a simdgroup matrix is in thread memory (MSL 2.4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup simdgroup_float8x8 m; // HERE
  x[0] = 1;
}
