// certain: twin of the refused program: threadgroup memory runs no constructor of a matrix (llama.cpp #26646)
#include <metal_stdlib>
using namespace metal;
struct S { float4 m[4]; };
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup S s;
  x[0] = s.m[0][0];
}
