// certain: lambdas from 3.2 on (MSL 3.2, 1.5.4)
// std: metal3.2
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) {
  auto f = [&](int a) { return a + x[1]; };
  x[0] = f(1);
}
