// certain: variable length array
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { int n = x[0]; int t[n]; t[0]=1; x[1]=t[0]; }  // HERE
