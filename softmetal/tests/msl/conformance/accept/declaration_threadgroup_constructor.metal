// certain: a default constructor qualified `threadgroup` makes objects in threadgroup memory (MLX complex.h)
#include <metal_stdlib>
using namespace metal;
struct S { float a; S() : a(0) {} S() threadgroup {} };
kernel void k(device float* x [[buffer(0)]]) { threadgroup S s[2]; s[0].a = x[0]; x[1] = s[0].a; }
