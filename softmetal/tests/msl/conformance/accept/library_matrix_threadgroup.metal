// likely: twin of the refused program: a simdgroup matrix is in thread memory (MSL 2.4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) {
  simdgroup_float8x8 m;
  simdgroup_load(m, x);
  simdgroup_store(m, x);
}
