// certain: threadgroup_barrier() needs mem_flags
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { threadgroup_barrier(); x[0]=1; }  // HERE
