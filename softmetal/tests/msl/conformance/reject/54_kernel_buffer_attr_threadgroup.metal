// certain: [[buffer(0)]] on a threadgroup pointer
#include <metal_stdlib>
using namespace metal;
kernel void k(threadgroup int* t [[buffer(0)]], device int* x [[buffer(1)]]) { x[0]=t[0]; }  // HERE
