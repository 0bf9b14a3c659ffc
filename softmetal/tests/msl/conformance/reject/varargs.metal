// certain: C varargs (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
float f(int n, ...) { return n; }  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = f(1, 2); }
