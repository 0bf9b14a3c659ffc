// certain: a member function cannot be a kernel
#include <metal_stdlib>
using namespace metal;
struct S { kernel void k(device int* x [[buffer(0)]]) { x[0]=1; } };  // HERE
