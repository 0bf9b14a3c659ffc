// certain: a program-scope constant is known when it is compiled (MSL 4.2)
#include <metal_stdlib>
using namespace metal;
float f(float a) { return a * a; }
constant float table[2] = {1, f(3)}; // HERE
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = table[1]; }
