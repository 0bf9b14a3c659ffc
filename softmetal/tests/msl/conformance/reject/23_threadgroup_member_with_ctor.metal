// likely: threadgroup object of a class with a non-trivial constructor
#include <metal_stdlib>
using namespace metal;
struct S { float a; S() : a(1) {} };
kernel void k(device float* x [[buffer(0)]]) { threadgroup S s; x[0]=s.a; }  // HERE
