// certain: unqualified library name without using namespace metal
#include <metal_stdlib>
kernel void k(device float* x [[buffer(0)]]) { x[0]=max(x[0],x[1]); }  // HERE
