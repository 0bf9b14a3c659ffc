// worth: noexcept operator (spec 1.5.4: noexcept not available)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { x[0]=noexcept(x[0]+1); }  // HERE
