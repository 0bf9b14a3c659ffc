// certain: min(int, uint) is ambiguous
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]], device uint* y [[buffer(1)]]) { x[0] = min(x[0], y[0]); }  // HERE
