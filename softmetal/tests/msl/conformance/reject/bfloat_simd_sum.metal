// likely: reductions and prefix operations have no bfloat (tables 6.14 and 6.16)
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* x) {
  x[0] = simd_sum(x[1]);  // HERE
}
