// certain: a local variable cannot live in device
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { device float y; y=1; x[0]=y; }  // HERE
