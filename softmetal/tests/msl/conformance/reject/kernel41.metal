// likely: a kernel's buffer still names its space at 4.1 (MSL 4.1: the generic address space)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
kernel void k(float* o [[buffer(0)]]) { o[0] = 1; }  // HERE
