// certain: a buffer whose pointer type is an alias (MSL specification 5.1, 5.2.1, arguments of kernels)
#include <metal_stdlib>
using namespace metal;
typedef device float* Floats;
using Scale = constant float&;
kernel void k(Floats o [[buffer(0)]], Scale s [[buffer(1)]], uint i [[thread_position_in_grid]]) { o[i] = s; }
