// certain: overloads on address spaces (MSL 1.5.1)
#include <metal_stdlib>
using namespace metal;
void f(thread float& a) { a = 1; }
void f(device float& a) { a = 2; }
void f(threadgroup float& a) { a = 3; }
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { float y; f(y); f(x[0]); f(t[0]); x[1] = y + t[0]; }
