// likely: a function with a name that the library does not have (SPIRV-Cross #2228)
#include <metal_stdlib>
using namespace metal;
float3 portion(float3 a, float3 b) { return a / b; }
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = portion(float3(1), float3(2)).x; }
