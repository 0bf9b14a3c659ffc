// certain: hypot does not exist
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { x[0]=hypot(x[0],x[1]); }  // HERE
