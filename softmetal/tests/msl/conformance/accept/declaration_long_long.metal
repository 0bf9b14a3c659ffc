// likely: twin of the refused program: long long is not a type of Metal (MSL 2.1)
#include <metal_stdlib>
using namespace metal;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  long a = 1;
  x[0] = a;
}
