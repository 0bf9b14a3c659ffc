// likely: extern functions, and Core Image's extern "C"
#include <metal_stdlib>
using namespace metal;
extern float f(float x);
extern "C" { namespace coreimage_like { float g(float x) { return x; } } }
float f(float x) { return x + coreimage_like::g(x); }
kernel void k(device float* o [[buffer(0)]]) { o[0] = f(o[1]); }
