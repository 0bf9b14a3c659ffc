// certain: #include <cmath>
#include <metal_stdlib>
#include <cmath>  // HERE
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { x[0]=1; }
