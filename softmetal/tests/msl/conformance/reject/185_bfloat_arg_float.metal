// certain: float argument to a bfloat parameter
#include <metal_stdlib>
using namespace metal;
float f(bfloat a) { return a; }
kernel void k(device float* x [[buffer(0)]]) { x[0]=f(x[1]); }  // HERE
