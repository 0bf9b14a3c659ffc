// worth: twin of the refused program: no wide strings or characters (MSL 1.5.4)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x [[buffer(0)]]) {
  x[0] = 'a';
}
