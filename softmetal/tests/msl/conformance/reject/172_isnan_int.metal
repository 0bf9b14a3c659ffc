// likely: isnan(int) is ambiguous
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { x[0]=isnan(x[0]); }  // HERE
