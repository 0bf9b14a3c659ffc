// certain: two function constants one index (MSL specification 5.8, function constants)
#include <metal_stdlib>
using namespace metal;
constant int kA [[function_constant(2)]];
constant int kB [[function_constant(2)]];  // HERE
kernel void k(device int* o [[buffer(0)]]) { o[0] = kA + kB; }
