// certain: twin of the refused program: a device pointer is no thread pointer (MSL 4; SPIRV-Cross #2064)
#include <metal_stdlib>
using namespace metal;
void f(device float* p) { p[0] = 1; }
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  f(x);
}
