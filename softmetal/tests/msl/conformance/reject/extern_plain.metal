// likely: extern variables, in no address space
#include <metal_stdlib>
using namespace metal;
extern int n;  // HERE
kernel void k(device int* o [[buffer(0)]]) { o[0] = 1; }
