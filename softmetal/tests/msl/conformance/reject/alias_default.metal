// certain: a default template argument that is a pointer without address space
#include <metal_stdlib>
using namespace metal;
template <typename T = float*> struct S { int x; };  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = 1; }
