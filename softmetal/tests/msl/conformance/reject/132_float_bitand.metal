// certain: & on float
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { x[0]=x[0]&1.0f; }  // HERE
