// certain: run-time recursion through a template
#include <metal_stdlib>
using namespace metal;
template <typename T> T f(T n) { return n > 0 ? f(n-1) : n; }  // HERE
kernel void k(device int* x [[buffer(0)]]) { x[0]=f(x[1]); }
