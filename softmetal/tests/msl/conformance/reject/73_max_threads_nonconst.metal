// certain: max_total_threads_per_threadgroup needs a constant expression
#include <metal_stdlib>
using namespace metal;
constant int n [[function_constant(0)]];
[[kernel, max_total_threads_per_threadgroup(n)]] void k(device int* x [[buffer(0)]]) { x[0]=1; }  // HERE
