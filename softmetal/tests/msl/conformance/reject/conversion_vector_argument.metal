// certain: a half4 is no argument for a float4 (MSL 2.2)
#include <metal_stdlib>
using namespace metal;
float f(float4 v) { return v.x; }
kernel void k(device half4* h [[buffer(0)]], device float* x [[buffer(1)]]) {
  x[0] = f(h[0]); // HERE
}
