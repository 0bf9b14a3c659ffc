// certain: simd_shuffle of a struct
#include <metal_stdlib>
using namespace metal;
struct S { int a; };
kernel void k(device int* x [[buffer(0)]]) { S s; s.a=1; x[0]=simd_shuffle(s,ushort(0)).a; }  // HERE
