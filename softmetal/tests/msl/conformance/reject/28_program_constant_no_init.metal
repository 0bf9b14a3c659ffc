// certain: program-scope constant must be initialised
#include <metal_stdlib>
using namespace metal;
constant int y;  // HERE
kernel void k(device int* x [[buffer(0)]]) { x[0]=y; }
