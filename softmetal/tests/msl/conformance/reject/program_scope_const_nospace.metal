// certain: program-scope const without constant space (MSL specification 4.3, constant memory)
#include <metal_stdlib>
using namespace metal;
const float scale = 2.0f;  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = scale; }
