// certain: twin of the refused program: input declarations with 'thread_execution_width' and 'threads_per_simdgroup' (m1-gpu-cpp #4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]], uint a [[threads_per_simdgroup]],
    uint b [[simdgroups_per_threadgroup]]) {
  x[a] = b;
}
