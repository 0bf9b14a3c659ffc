// likely: extern variables (MSL specification 4.2: constant memory is initialised where it is declared)
#include <metal_stdlib>
using namespace metal;
extern constant int n;  // HERE
kernel void k(device int* o [[buffer(0)]]) { o[0] = n; }
