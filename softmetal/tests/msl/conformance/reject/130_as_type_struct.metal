// worth: as_type of a struct
#include <metal_stdlib>
using namespace metal;
struct S { int a; };
kernel void k(device int* x [[buffer(0)]]) { S s; s.a=1; x[0]=as_type<int>(s); }  // HERE
