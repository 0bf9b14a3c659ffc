// certain: integers that end in L are long (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) { o[0] = 12L + 0x1eL + 3UL; }
