// certain: a function constant must be a scalar or vector
#include <metal_stdlib>
using namespace metal;
constant int a[2] [[function_constant(0)]];  // HERE
kernel void k(device int* x [[buffer(0)]]) { x[0]=a[1]; }
