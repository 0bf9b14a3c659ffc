// certain: lambdas from 3.2 (MSL specification 3.2, what is new)
// std: metal3.2
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float s = 3;
  auto f = [&](float x) { return x * s; };
  auto g = [=](float x) { return x + s; };
  o[i] = f(2) + g(1);
}
