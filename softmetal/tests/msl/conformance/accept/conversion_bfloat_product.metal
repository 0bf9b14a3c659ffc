// certain: twin of the refused program: bfloat times float is float (MSL 2.1, cubecl #1201)
#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* x [[buffer(0)]]) {
  x[0] = x[1] * bfloat(2.0f);
}
