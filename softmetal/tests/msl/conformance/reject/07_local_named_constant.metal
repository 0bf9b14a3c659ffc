// certain: `constant` is a keyword
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { float constant = 1; x[0] = constant; }  // HERE
