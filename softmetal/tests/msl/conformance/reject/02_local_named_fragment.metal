// certain: `float4 fragment;` -- crosstl issue #1140/#1159: xcrun metal refuses
#include <metal_stdlib>
using namespace metal;
kernel void k(device float4* x [[buffer(0)]]) { float4 fragment = x[0]; x[1] = fragment; }  // HERE
