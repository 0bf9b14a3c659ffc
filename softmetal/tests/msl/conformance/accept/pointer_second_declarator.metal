// likely: twin of the refused program: every pointer names its address space (MSL 4)
#include <metal_stdlib>
using namespace metal;
typedef struct S { int a, b; } S, S4[4];
typedef device S *PS, *QS;
float f(int a) { float b = a, c(2), d = b * c; return d; }
kernel void k(device S* x) { PS p = x; QS q = p; S4 s; s[0].a = f(1); q->a = s[0].a; }
