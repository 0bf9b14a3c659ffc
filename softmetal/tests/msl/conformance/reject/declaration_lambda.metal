// certain: lambdas are from 3.2 on (MSL 3.2, 1.5.4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) {
  auto f = [](int a) { return a + 1; }; // HERE
  x[0] = f(1);
}
