// certain: function constant as an array bound (MSL specification 5.8, function constants)
#include <metal_stdlib>
using namespace metal;
constant int kA [[function_constant(2)]];
kernel void k(device int* o [[buffer(0)]]) {
  int a[kA];  // HERE
  a[0] = 1;
  o[0] = a[0];
}
