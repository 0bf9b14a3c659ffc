// certain: max(uint, 0) is ambiguous (uint, int)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]]) { x[0] = max(x[0], 0); }  // HERE
