// likely: register storage class
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { register int a = 1; x[0]=a; }  // HERE
