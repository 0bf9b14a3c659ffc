// certain: a buffer that is no pointer behind its alias (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
typedef float Floats;
kernel void k(device float* o [[buffer(1)]], Floats s [[buffer(0)]]) { o[0] = s; }  // HERE
