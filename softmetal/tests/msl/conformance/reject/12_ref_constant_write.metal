// certain: constant memory is read-only
#include <metal_stdlib>
using namespace metal;
struct P { float a; };
kernel void k(constant P& p [[buffer(0)]]) { p.a = 1; }  // HERE
