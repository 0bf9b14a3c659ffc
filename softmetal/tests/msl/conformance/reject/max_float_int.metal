// likely: max of float and int is ambiguous (MSL specification 6, overloads of metal_math and metal_common)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* n [[buffer(0)]]) { n[0] = max(n[1], 0); }  // HERE
