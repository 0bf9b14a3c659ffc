// likely: float -> bfloat is explicit only (MSL 2.1: implicit conversion not allowed)
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* x [[buffer(0)]], device float* y [[buffer(1)]]) { x[0] = y[0]; }  // HERE
