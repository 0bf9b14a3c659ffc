// certain: an alias of a pointer without address space
#include <metal_stdlib>
using namespace metal;
using P = float*;  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = sizeof(P); }
