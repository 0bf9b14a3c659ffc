// certain: an unnamed parameter that points without address space
#include <metal_stdlib>
using namespace metal;
float f(int, float*) { return 1; }  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = 1; }
