// certain: plain load of an atomic (MSL specification 2.6, 6.15, atomics)
#include <metal_stdlib>
using namespace metal;
kernel void k(device atomic_uint* a [[buffer(0)]], device uint* o [[buffer(1)]]) { o[0] = a[0]; }  // HERE
