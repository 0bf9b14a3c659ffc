// certain: [[max_total_threads_per_threadgroup]] after the parameter list cannot be applied to types
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]]) [[max_total_threads_per_threadgroup(32)]] { x[0]=1; }  // HERE
