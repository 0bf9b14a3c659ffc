// certain: reinterpret_cast to a pointer without address space
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { x[0]=*reinterpret_cast<int*>(x); }  // HERE
