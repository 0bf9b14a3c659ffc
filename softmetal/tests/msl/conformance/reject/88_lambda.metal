// likely: lambda expression in MSL 3.1 (allowed from 3.2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { auto f = [](int a) { return a; }; x[0]=f(1); }  // HERE
