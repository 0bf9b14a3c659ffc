// certain: twin of the refused program: a buffer of pointers needs a struct (MSL 5.2.1)
#include <metal_stdlib>
using namespace metal;
struct S { device float* p; };
kernel void k(
    device S* x [[buffer(0)]]) {
  x[0].p[0] = 1;
}
