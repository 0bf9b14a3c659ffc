// certain: twin of the refused program: simd_and is for integers (MSL table 6.13)
#include <metal_stdlib>
using namespace metal;
kernel void k(device uint* x [[buffer(0)]]) {
  x[0] = simd_and(x[1]);
}
