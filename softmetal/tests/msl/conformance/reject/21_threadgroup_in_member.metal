// certain: threadgroup variable in a member function
#include <metal_stdlib>
using namespace metal;
struct S { void f(device float* x) { threadgroup float t[4]; t[0]=x[0]; x[1]=t[0]; } };  // HERE
kernel void k(device float* x [[buffer(0)]]) { S s; s.f(x); }
