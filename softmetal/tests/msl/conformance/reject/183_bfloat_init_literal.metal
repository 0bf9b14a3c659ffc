// certain: bfloat b = 0.0f (cubecl #1201, pytorch #177193)
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* x [[buffer(0)]]) { bfloat b = 0.0f; x[0]=b; }  // HERE
