// certain: twin of the refused program: a device member function is not called on threadgroup memory (MSL 4)
#include <metal_stdlib>
using namespace metal;
struct S { float a; float get() const device { return a; } float get() const threadgroup { return a; } };
kernel void k(device float* x [[buffer(0)]], device S* d [[buffer(1)]], threadgroup S& s [[threadgroup(0)]]) {
  x[0] = s.get() + d->get();
}
