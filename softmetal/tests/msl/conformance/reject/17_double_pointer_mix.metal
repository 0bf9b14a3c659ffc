// certain: nested address spaces must agree
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { thread float* p; device float* thread* q = &p; *q = x; }  // HERE
