// certain: const_cast cannot change address space
#include <metal_stdlib>
using namespace metal;
kernel void k(constant float* c [[buffer(0)]], device float* x [[buffer(1)]]) { device float* p = const_cast<device float*>(c); p[0]=1; x[0]=p[0]; }  // HERE
