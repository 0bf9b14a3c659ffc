// certain: a function constant is no constant expression (array bound)
#include <metal_stdlib>
using namespace metal;
constant int n [[function_constant(0)]];
kernel void k(device int* x [[buffer(0)]]) { int t[n]; t[0]=1; x[0]=t[0]; }  // HERE
