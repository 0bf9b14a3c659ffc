// certain: constant pointer to device pointer (MSL specification 4.3, constant memory)
#include <metal_stdlib>
using namespace metal;
void f(device const float* p, device float* o) { o[0] = p[0]; }
kernel void k(device float* o [[buffer(0)]], constant float* c [[buffer(1)]]) { f(c, o); }  // HERE
