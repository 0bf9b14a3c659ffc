// likely: every pointer names its address space (MSL 4)
#include <metal_stdlib>
using namespace metal;
typedef struct S { int a; } S, *PS;  // HERE
kernel void k(device S* x) { x[0].a = 1; }
