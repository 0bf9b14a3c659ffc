// certain: recursive function (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
int f(int n) { return n < 2 ? n : f(n - 1); }  // HERE
kernel void k(device int* o [[buffer(0)]]) { o[0] = f(o[1]); }
