// likely: kernel templates that share a name; instantiations choose by their parameters (C++ [temp.explicit])
#include <metal_stdlib>
using namespace metal;
template <typename T>
kernel void f(device T* o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = T(1); }
template <typename T>
[[kernel]] void f(device T* o [[buffer(0)]], constant T& x [[buffer(1)]], uint i [[thread_position_in_grid]]) { o[i] = x; }
template <typename T>
kernel void f(device T* o [[buffer(0)]], device T* x [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  threadgroup T shared[32];
  shared[i % 32] = x[i];
  o[i] = shared[i % 32];
}
template <typename T, int N>
kernel void f(device T* o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = T(N); }
template [[host_name("f1")]] kernel void f<float>(device float*, uint);
template [[host_name("f2")]] [[kernel]] void f<half>(device half* o [[buffer(0)]], constant half& x [[buffer(1)]], uint i [[thread_position_in_grid]]);
template [[host_name("f3")]] kernel void f<float>(device float*, device float*, uint);
template [[host_name("f4")]] kernel void f<int, 4>(device int*, uint);
