// certain: a by-value parameter cannot be qualified with device
#include <metal_stdlib>
using namespace metal;
float f(device float x) { return x; }  // HERE
kernel void k(device float* x [[buffer(0)]]) { x[0]=f(x[1]); }
