// certain: the exponent of frexp goes to thread memory (MSL 6.5)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], device int* e [[buffer(1)]]) {
  x[0] = frexp(x[0], e[0]); // HERE
}
