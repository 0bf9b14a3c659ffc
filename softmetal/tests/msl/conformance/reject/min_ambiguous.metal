// certain: max of int and uint ambiguous (MSL specification 6, overloads of metal_math and metal_common)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* n [[buffer(0)]], device uint* u [[buffer(1)]]) { n[0] = max(n[1], u[0]); }  // HERE
