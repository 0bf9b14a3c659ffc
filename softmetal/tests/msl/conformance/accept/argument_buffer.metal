// certain: struct of pointers in a constant buffer (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
struct Args {
  device float* a;
  constant float* b;
  uint n;
};
kernel void k(constant Args& g [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i < g.n) g.a[i] = g.b[i];
}
