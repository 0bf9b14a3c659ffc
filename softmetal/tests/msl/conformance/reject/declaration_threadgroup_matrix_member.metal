// certain: threadgroup memory runs no constructor of a matrix (llama.cpp #26646)
#include <metal_stdlib>
using namespace metal;
struct S { float4x4 m; };
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup S s; // HERE
  x[0] = s.m[0][0];
}
