// certain: twin of the refused program: an index is at most 65535 (MSL 5.8)
#include <metal_stdlib>
using namespace metal;
constant int n [[function_constant(65535)]];
kernel void k(device int* x [[buffer(0)]]) { x[0] = n; }
