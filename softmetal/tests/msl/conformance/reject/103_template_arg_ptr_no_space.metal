// likely: a pointer without address space as template argument
#include <metal_stdlib>
using namespace metal;
template <typename T> struct B { T v; };
kernel void k(device float* x [[buffer(0)]]) { B<float*> b; x[0]=1; }  // HERE
