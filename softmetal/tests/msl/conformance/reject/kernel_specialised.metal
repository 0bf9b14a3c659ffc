// worth: worth refusing: explicit specialisations of kernels are not supported
#include <metal_stdlib>
using namespace metal;
template <typename T> kernel void k(device T* x [[buffer(0)]]) { x[0] = 1; }
template <> kernel void k<float>(device float* x [[buffer(0)]]) { x[0] = 2; }  // HERE
template [[host_name("a")]] kernel void k<half>(device half*);
