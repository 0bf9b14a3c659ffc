// certain: int4 + uint4: no implicit vector conversion
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint4* x [[buffer(0)]], device int4* y [[buffer(1)]]) { x[0]=x[0]+y[0]; }  // HERE
