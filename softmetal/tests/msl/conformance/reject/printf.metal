// certain: printf (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) { printf("%f", o[0]); }  // HERE
