// certain: an alias template of a reference without address space
#include <metal_stdlib>
using namespace metal;
template <typename T> using R = T&;  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = 1; }
