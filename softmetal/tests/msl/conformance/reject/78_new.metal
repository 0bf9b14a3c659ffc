// certain: new
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { thread int* p = new int(1); x[0]=*p; }  // HERE
