// certain: function constant of struct type (MSL specification 5.8, function constants)
#include <metal_stdlib>
using namespace metal;
struct S {
  int a;
};
constant S kA [[function_constant(2)]];  // HERE
kernel void k(device int* o [[buffer(0)]]) { o[0] = kA.a; }
