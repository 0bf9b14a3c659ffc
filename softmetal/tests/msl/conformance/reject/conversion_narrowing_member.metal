// certain: uint to int in an aggregate narrows (C++14 dcl.init.list)
#include <metal_stdlib>
using namespace metal;
struct S { int a; };
kernel void k(device uint* x [[buffer(0)]]) {
  S s = {x[0]}; // HERE
  x[1] = s.a;
}
