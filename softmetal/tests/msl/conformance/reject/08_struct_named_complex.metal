// certain: `complex` is a reserved type of metal_types (naga #702)
#include <metal_stdlib>
using namespace metal;
struct complex { float re, im; };  // HERE
kernel void k(device complex* x [[buffer(0)]]) { x[0].re = 1; }
