// likely: twin of the refused program: no function calls a kernel (MSL 5.1)
#include <metal_stdlib>
using namespace metal;
void a(device int* x) { x[0] = 1; }
void f(device int* x) {
  a(x);
}
kernel void b(device int* x [[buffer(0)]]) { f(x); }
