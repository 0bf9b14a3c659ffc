// certain: a constant value binds to no const thread reference (MSL 4; krafix #95)
#include <metal_stdlib>
using namespace metal;
float f(const thread float& p) { return p; }
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  x[0] = f(c); // HERE
}
