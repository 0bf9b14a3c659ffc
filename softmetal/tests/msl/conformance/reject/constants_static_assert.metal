// certain: a function constant is no constant expression (MSL 5.8)
#include <metal_stdlib>
using namespace metal;
constant int n [[function_constant(0)]];
static_assert(n > 0, "n"); // HERE
kernel void k(device int* x [[buffer(0)]]) { x[0] = n; }
