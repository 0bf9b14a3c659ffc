// certain: a function constant has no initialiser (MSL 5.8)
#include <metal_stdlib>
using namespace metal;
constant int n [[function_constant(0)]] = 3; // HERE
kernel void k(device int* x [[buffer(0)]]) { x[0] = n; }
