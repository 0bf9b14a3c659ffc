// certain: twin of the refused program: vectors do not convert by themselves (MSL 2.2; SPIRV-Cross: cannot convert between vector values)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int4* x [[buffer(0)]], device uint4* y [[buffer(1)]]) {
  x[0] = int4(y[0]);
}
