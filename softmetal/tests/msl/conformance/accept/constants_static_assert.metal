// certain: twin of the refused program: a function constant is no constant expression (MSL 5.8)
#include <metal_stdlib>
using namespace metal;
constant int n = 1;
static_assert(n > 0, "n");
kernel void k(device int* x [[buffer(0)]]) { x[0] = n; }
