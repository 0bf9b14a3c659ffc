// certain: a function constant is no template argument
#include <metal_stdlib>
using namespace metal;
template <int N> int f() { return N; }
constant int n [[function_constant(0)]];
kernel void k(device int* x [[buffer(0)]]) { x[0]=f<n>(); }  // HERE
