// certain: [[thread_execution_width]] with [[threads_per_simdgroup]] (m1-gpu-cpp #4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]], uint a [[thread_execution_width]], uint b [[threads_per_simdgroup]]) { x[0]=a+b; }  // HERE
