// certain: enumerator as index of a function constant (MSL specification 5.8, function constants)
#include <metal_stdlib>
using namespace metal;
enum { kIdx = 4 };
constant int base = 10;
constant uint kC [[function_constant(kIdx)]];
constant uint2 kV [[function_constant(base + 1)]];
constant half kH [[function_constant(20)]];
kernel void k(device float* o [[buffer(0)]]) { o[0] = kC + kV.x + float(kH); }
