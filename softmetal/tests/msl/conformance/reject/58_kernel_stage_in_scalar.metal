// certain: [[position]] is no kernel attribute
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]], float4 p [[position]]) { x[0]=p.x; }  // HERE
