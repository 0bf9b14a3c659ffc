// likely: string literal to a char pointer without constant
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) { const thread char* s = "abc"; x[0]=s[0]; }  // HERE
