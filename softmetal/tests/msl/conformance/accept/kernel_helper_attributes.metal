// likely: attributes on parameters of other functions do nothing (torch PrefillAttention.h get_coord)
#include <metal_stdlib>
using namespace metal;
uint f(uint lane [[thread_index_in_simdgroup]]) { return lane; }
kernel void k(device uint* x [[buffer(0)]], uint i [[thread_index_in_simdgroup]]) { x[i] = f(i); }
