// likely: a pointer to a simdgroup matrix in device memory used as an object
#include <metal_stdlib>
using namespace metal;
kernel void k(device simdgroup_float8x8* m [[buffer(0)]], device float* x [[buffer(1)]]) { x[0]=m[0].thread_elements()[0]; }  // HERE
