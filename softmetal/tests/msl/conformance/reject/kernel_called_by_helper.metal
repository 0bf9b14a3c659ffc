// likely: no function calls a kernel (MSL 5.1)
#include <metal_stdlib>
using namespace metal;
kernel void a(device int* x [[buffer(0)]]) { x[0] = 1; }
void f(device int* x) {
  a(x); // HERE
}
kernel void b(device int* x [[buffer(0)]]) { f(x); }
