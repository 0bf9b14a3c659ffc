// certain: a kernel may be declared before it is defined (C++ [basic.def])
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]);
template <typename T> [[kernel]] void f(device T* x [[buffer(0)]]);
kernel void k(device float* x [[buffer(0)]]) { x[0] = 1; }
template <typename T> [[kernel]] void f(device T* x [[buffer(0)]]) { x[0] = 1; }
template [[host_name("f1")]] [[kernel]] void f<int>(device int*);
