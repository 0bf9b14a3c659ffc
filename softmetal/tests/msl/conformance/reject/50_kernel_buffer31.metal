// certain: buffer index above 30
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(31)]]) { x[0]=1; }  // HERE
