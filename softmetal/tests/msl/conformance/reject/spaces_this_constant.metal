// certain: a member function without `constant` is not called on constant memory (MSL 4; ogre-next #323)
#include <metal_stdlib>
using namespace metal;
struct S { float a; float get() const { return a; } };
kernel void k(constant S& s [[buffer(0)]], device float* x [[buffer(1)]]) {
  x[0] = s.get(); // HERE
}
