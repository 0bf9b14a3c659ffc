// certain: simdgroup_store to const memory
#include <metal_stdlib>
using namespace metal;
kernel void k(const device float* x [[buffer(0)]]) { simdgroup_float8x8 m; simdgroup_store(m, x, 8); }  // HERE
