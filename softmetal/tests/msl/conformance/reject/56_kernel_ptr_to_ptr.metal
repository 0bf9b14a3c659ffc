// certain: a kernel parameter cannot be a pointer to pointer without a struct
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* device* x [[buffer(0)]]) { x[0][0]=1; }  // HERE
