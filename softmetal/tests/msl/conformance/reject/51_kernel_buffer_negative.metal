// certain: buffer(-1)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(-1)]]) { x[0]=1; }  // HERE
