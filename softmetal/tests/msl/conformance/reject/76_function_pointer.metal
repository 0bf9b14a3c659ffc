// likely: a plain function pointer (no visible_function_table)
#include <metal_stdlib>
using namespace metal;
int f(int x) { return x; }
kernel void k(device int* x [[buffer(0)]]) { int (*p)(int) = f; x[0]=p(1); }  // HERE
