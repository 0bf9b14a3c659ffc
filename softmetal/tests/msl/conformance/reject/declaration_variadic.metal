// worth: no variadic functions but templates (MSL 1.5.2)
#include <metal_stdlib>
using namespace metal;
int f(int n, ...) { return n; } // HERE
kernel void k(device int* x [[buffer(0)]]) { x[0] = f(1, 2); }
