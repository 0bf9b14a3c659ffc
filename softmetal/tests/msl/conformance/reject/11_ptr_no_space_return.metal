// certain: a returned pointer needs an address space
#include <metal_stdlib>
using namespace metal;
float* f(device float* x) { return x; }  // HERE
kernel void k(device float* x [[buffer(0)]]) { f(x)[0] = 1; }
