// certain: const thread reference to device object in a named space (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
float f(const thread float& a) { return a; }
kernel void k(device float* o [[buffer(0)]]) { o[0] = f(o[1]); }  // HERE
