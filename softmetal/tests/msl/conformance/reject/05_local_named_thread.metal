// certain: `thread` is a keyword (SPIRV-Cross #2073: expected unqualified-id)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { uint thread = 1; x[thread] = 1; }  // HERE
