// certain: as_type does not take pointers
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { device int* p = as_type<device int*>(x); p[0]=1; }  // HERE
