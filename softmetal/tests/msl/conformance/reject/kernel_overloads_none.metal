// certain: an instantiation has the parameters of one of the overloads (C++ [temp.explicit])
#include <metal_stdlib>
using namespace metal;
template <typename T> kernel void k(device T* x [[buffer(0)]]) { x[0] = T(1); }
template <typename T> kernel void k(device T* x [[buffer(0)]], constant int& n [[buffer(1)]]) { x[0] = T(n); }
template [[host_name("a")]] kernel void k<float>(device float*, device float*);  // HERE
