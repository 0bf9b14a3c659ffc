// certain: expm1 does not exist
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { x[0]=expm1(x[0]); }  // HERE
