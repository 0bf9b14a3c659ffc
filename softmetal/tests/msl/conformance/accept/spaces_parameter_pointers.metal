// certain: twin of the refused program: pointer parameters need an address space (llama.cpp #3898)
#include <metal_stdlib>
using namespace metal;
void f(
    thread float * a, thread float * b
) { *a = *b; }
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = 1; }
