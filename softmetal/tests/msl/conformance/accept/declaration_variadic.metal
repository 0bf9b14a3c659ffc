// worth: twin of the refused program: no variadic functions but templates (MSL 1.5.2)
#include <metal_stdlib>
using namespace metal;
template <typename... T> int f(int n, T...) { return n; }
kernel void k(device int* x [[buffer(0)]]) { x[0] = f(1, 2); }
