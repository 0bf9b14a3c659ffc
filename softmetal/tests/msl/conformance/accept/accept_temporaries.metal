// certain: values of any memory make temporaries for const thread references of another type (C++ dcl.init.ref)
#include <metal_stdlib>
using namespace metal;
float f(const thread float& a) { return a; }
kernel void k(device float* x [[buffer(0)]], device int* n [[buffer(1)]]) {
  x[0] = f(n[0]) + f(x[1] + 1);
}
