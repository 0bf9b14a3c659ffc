// certain: function constant as a template argument (MSL specification 5.8, function constants)
#include <metal_stdlib>
using namespace metal;
constant int kA [[function_constant(2)]];
template <int N>
int f() {
  return N;
}
kernel void k(device int* o [[buffer(0)]]) { o[0] = f<kA>(); }  // HERE
