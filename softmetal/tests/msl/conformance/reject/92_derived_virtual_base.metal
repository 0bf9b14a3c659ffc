// certain: virtual base class
#include <metal_stdlib>
using namespace metal;
struct A { int a; };
struct B : virtual A { int b; };  // HERE
kernel void k(device int* x [[buffer(0)]]) { B b; b.a=1; x[0]=b.a; }
