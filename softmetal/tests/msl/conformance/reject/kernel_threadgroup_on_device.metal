// certain: [[threadgroup(0)]] is for threadgroup pointers (MSL 5.2.1)
#include <metal_stdlib>
using namespace metal;
kernel void k(
    device uint* x [[threadgroup(0)]]) { // HERE
  x[0] = 1;
}
