// certain: a gate may derive from a function constant (MSL 5.8.1)
#include <metal_stdlib>
using namespace metal;
constant int n [[function_constant(0)]];
constant bool g = n > 2;
kernel void k(device int* x [[buffer(0)]], device int* y [[buffer(1), function_constant(g)]]) { x[0] = g ? y[0] : 1; }
