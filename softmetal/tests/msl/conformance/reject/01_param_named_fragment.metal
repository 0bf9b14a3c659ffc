// certain: `fragment` is a keyword (5.1); as an identifier it does not parse (what csrc/kernels/tile.h:66 does)
#include <metal_stdlib>
using namespace metal;
template <typename T> inline void set_elements(thread simdgroup_matrix<T,8,8>& fragment, T v) { fragment.thread_elements()[0] = v; }  // HERE
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 m; set_elements(m, 1.0f); x[0] = m.thread_elements()[0]; }
