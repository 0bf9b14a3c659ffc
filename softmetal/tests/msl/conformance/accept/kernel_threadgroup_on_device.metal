// certain: twin of the refused program: [[threadgroup(0)]] is for threadgroup pointers (MSL 5.2.1)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]],
    threadgroup uint* t [[threadgroup(0)]]) {
  x[0] = t[0];
}
