// certain: an unqualified member function is for thread objects (MSL 4; -Wmetal-addr-spaces, MLX PR 3963)
#include <metal_stdlib>
using namespace metal;
struct S { float a; float get() const { return a; } };
kernel void k(device S* s [[buffer(0)]], device float* x [[buffer(1)]]) {
  x[0] = s->get(); // HERE
}
