// certain: threadgroup half4x4 t[2]: no default constructor (llama.cpp #26646)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]]) { threadgroup half4x4 t[2]; t[0][0]=half4(1); x[0]=t[0][0][0]; }  // HERE
