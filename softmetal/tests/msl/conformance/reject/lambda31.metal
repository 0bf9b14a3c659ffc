// certain: lambda before 3.2 (MSL specification 3.2, what is new)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* o [[buffer(0)]]) {
  auto f = [](float x) { return x * 2; };  // HERE
  o[0] = f(2);
}
