// certain: twin of the refused program: a function constant has no initialiser (MSL 5.8)
#include <metal_stdlib>
using namespace metal;
constant int n [[function_constant(0)]];
constant int m = is_function_constant_defined(n) ? n : 3;
kernel void k(device int* x [[buffer(0)]]) { x[0] = m; }
