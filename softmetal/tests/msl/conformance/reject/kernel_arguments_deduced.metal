// worth: worth refusing: an instantiation without template arguments is not supported
#include <metal_stdlib>
using namespace metal;
template <typename T> kernel void k(device T* x [[buffer(0)]]) { x[0] = 1; }
template [[host_name("a")]] kernel void k(device half*);  // HERE
