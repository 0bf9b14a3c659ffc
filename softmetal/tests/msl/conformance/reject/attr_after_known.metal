// certain: an attribute of functions behind the parameters applies to the type
#include <metal_stdlib>
using namespace metal;
float f(float x) [[noinline]] { return x; }  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = f(1); }
