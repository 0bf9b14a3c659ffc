// certain: input declarations with 'thread_execution_width' and 'threads_per_simdgroup' (m1-gpu-cpp #4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]], uint a [[threads_per_simdgroup]],
    uint b [[thread_execution_width]]) { // HERE
  x[a] = b;
}
