// certain: fmax(half, float) is ambiguous
#include <metal_stdlib>
using namespace metal;
kernel void k(device half* x [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = fmax(x[0], y[0]); }  // HERE
