// worth: worth refusing: the words of the parameters do not tell which overload is instantiated
#include <metal_stdlib>
using namespace metal;
template <typename T, enable_if_t<sizeof(T) == 2, bool> = true> kernel void k(device T* x [[buffer(0)]]) { x[0] = 1; }
template <typename T, enable_if_t<sizeof(T) == 4, bool> = true> kernel void k(device T* x [[buffer(0)]]) { x[0] = 2; }
template [[host_name("a")]] kernel void k<half>(device half*);  // HERE
