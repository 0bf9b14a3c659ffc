// likely: two instantiations with one host_name (MSL 5.1)
#include <metal_stdlib>
using namespace metal;
template <typename T> kernel void f(device T* x [[buffer(0)]]) { x[0] = 1; }
template [[host_name("f")]] kernel void f<float>(device float*);
template [[host_name("f")]] kernel void f<int>(device int*); // HERE
