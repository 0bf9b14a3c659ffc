// likely: a kernel function cannot be called by another kernel (5.1)
#include <metal_stdlib>
using namespace metal;
kernel void a(device int* x [[buffer(0)]]) { x[0]=1; }
kernel void b(device int* x [[buffer(0)]]) { a(x); }  // HERE
