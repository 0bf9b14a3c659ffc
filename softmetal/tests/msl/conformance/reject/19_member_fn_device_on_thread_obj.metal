// likely: a device-qualified member cannot be called on a thread object
#include <metal_stdlib>
using namespace metal;
struct S { float a; float get() const device { return a; } };
kernel void k(device float* x [[buffer(0)]]) { S s; s.a = 1; x[0] = s.get(); }  // HERE
