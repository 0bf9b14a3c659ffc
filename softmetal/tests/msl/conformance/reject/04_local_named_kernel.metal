// certain: `kernel` is a keyword
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { float kernel = x[0]; x[1] = kernel; }  // HERE
