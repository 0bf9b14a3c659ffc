// worth: the gate of an argument must derive from a function constant
#include <metal_stdlib>
using namespace metal;
constant bool g = true;
kernel void k(device int* x [[buffer(0)]], device int* y [[buffer(1), function_constant(g)]]) { x[0]=1; }  // HERE
