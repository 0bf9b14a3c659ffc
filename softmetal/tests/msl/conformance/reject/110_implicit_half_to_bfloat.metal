// likely: half -> bfloat is explicit only
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* x [[buffer(0)]], device half* y [[buffer(1)]]) { x[0] = y[0]; }  // HERE
