// certain: static constexpr member without constant
#include <metal_stdlib>
using namespace metal;
struct S { static constexpr int a = 3; };  // HERE
kernel void k(device int* x [[buffer(0)]]) { x[0]=S::a; }
