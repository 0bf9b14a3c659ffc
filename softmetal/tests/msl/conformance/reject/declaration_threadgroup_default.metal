// likely: threadgroup memory runs no member initialisers (MSL 4.4)
#include <metal_stdlib>
using namespace metal;
struct S { float a = 1; };
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup S s[2]; // HERE
  x[0] = s[0].a;
}
