// certain: writing a function constant (MSL specification 5.8, function constants)
#include <metal_stdlib>
using namespace metal;
constant int kA [[function_constant(2)]];
kernel void k(device int* o [[buffer(0)]]) {
  kA = 2;  // HERE
  o[0] = kA;
}
