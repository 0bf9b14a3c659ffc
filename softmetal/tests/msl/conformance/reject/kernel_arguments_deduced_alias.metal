// worth: worth refusing: template arguments that only the types behind aliases would tell are not supported
#include <metal_stdlib>
using namespace metal;
template <typename T> using D = device T*;
using F = device float*;
template <typename T> kernel void k(D<T> x [[buffer(0)]]) { x[0] = 1; }
template [[host_name("a")]] kernel void k(F);  // HERE
