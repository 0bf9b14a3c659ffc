// certain: reference return without address space
#include <metal_stdlib>
using namespace metal;
int& f(thread int& x) { return x; }  // HERE
kernel void k(device int* x [[buffer(0)]]) { int y=1; x[0]=f(y); }
