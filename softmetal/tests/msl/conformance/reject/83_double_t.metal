// certain: double
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { double d = 1; x[0]=d; }  // HERE
