// certain: twin of the refused program: two constants with one index, written differently (MSL 5.8)
#include <metal_stdlib>
using namespace metal;
constant int a [[function_constant(2)]];
constant bool b [[function_constant(1 + 2)]];
kernel void k(device int* x [[buffer(0)]]) { x[0] = a + b; }
