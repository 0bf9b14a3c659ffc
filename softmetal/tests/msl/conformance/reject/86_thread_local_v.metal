// certain: thread_local
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { thread_local int d = 1; x[0]=d; }  // HERE
