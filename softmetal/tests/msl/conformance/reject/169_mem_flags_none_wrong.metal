// certain: mem_flags::none does not exist (mem_none)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { simdgroup_barrier(mem_flags::none); x[0]=1; }  // HERE
