// certain: a kernel cannot be called main
#include <metal_stdlib>
using namespace metal;
kernel void main(device float* x [[buffer(0)]]) { x[0]=1; }  // HERE
