// certain: T of thread T& is not deduced as threadgroup float (MSL 4)
#include <metal_stdlib>
using namespace metal;
template <typename T> T f(const thread T& p) { return p; }
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  x[0] = f(t[0]); // HERE
}
