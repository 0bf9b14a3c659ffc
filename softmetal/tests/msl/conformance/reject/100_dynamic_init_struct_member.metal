// certain: reference member without address space
#include <metal_stdlib>
using namespace metal;
struct S { int& a; };  // HERE
kernel void k(device int* x [[buffer(0)]]) { x[0]=1; }
