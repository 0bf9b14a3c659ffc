// certain: two function constants with one index
#include <metal_stdlib>
using namespace metal;
constant int a [[function_constant(0)]];
constant int b [[function_constant(0)]];  // HERE
kernel void k(device int* x [[buffer(0)]]) { x[0]=a+b; }
