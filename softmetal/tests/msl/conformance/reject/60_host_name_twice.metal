// likely: two functions with one host_name
#include <metal_stdlib>
using namespace metal;
[[host_name("a")]] kernel void k1(device int* x [[buffer(0)]]) { x[0]=1; }
[[host_name("a")]] kernel void k2(device int* x [[buffer(0)]]) { x[0]=2; }  // HERE
