// likely: the gate of an argument must be a bool constant
#include <metal_stdlib>
using namespace metal;
constant int g [[function_constant(0)]];
kernel void k(device int* x [[buffer(0)]], device int* y [[buffer(1), function_constant(g)]]) { x[0]=1; }  // HERE
