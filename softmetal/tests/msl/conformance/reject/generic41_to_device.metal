// likely: at 4.1 generic to device needs a cast (MSL specification 1.5: C++14)
// std: metal4.1
#include <metal_stdlib>
using namespace metal;
void f(float* p) {
  device float* d = p;  // HERE
  d[0] = 1;
}
kernel void k(device float* o [[buffer(0)]]) { f(o); }
