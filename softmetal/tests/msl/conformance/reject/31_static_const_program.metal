// certain: `static const float t[] =` without constant
#include <metal_stdlib>
using namespace metal;
static const float t[2] = {1,2};  // HERE
kernel void k(device float* x [[buffer(0)]]) { x[0]=t[0]; }
