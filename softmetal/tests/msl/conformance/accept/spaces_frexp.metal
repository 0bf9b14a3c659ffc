// certain: twin of the refused program: the exponent of frexp goes to thread memory (MSL 6.5)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], device int* e [[buffer(1)]]) {
  int n;
  x[0] = frexp(x[0], n);
  e[0] = n;
}
