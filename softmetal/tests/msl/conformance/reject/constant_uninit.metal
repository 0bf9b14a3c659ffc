// certain: program-scope constant without initialiser (MSL specification 4.3, constant memory)
#include <metal_stdlib>
using namespace metal;
constant float a;  // HERE
kernel void k(device float* o [[buffer(0)]]) { o[0] = a; }
