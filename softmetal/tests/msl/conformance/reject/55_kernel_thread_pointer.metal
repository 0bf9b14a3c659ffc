// certain: a kernel parameter cannot be a thread pointer
#include <metal_stdlib>
using namespace metal;
kernel void k(thread int* x [[buffer(0)]]) { x[0]=1; }  // HERE
