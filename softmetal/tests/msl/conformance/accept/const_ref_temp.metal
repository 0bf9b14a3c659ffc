// certain: const thread reference to a temporary (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
float f(const thread float& a) { return a; }
float g(thread const float4& a) { return a.x; }
kernel void k(device float* o [[buffer(0)]]) { o[0] = f(2.0f) + g(float4(1)); }
