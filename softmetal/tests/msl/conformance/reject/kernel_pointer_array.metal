// certain: a buffer of pointers needs a struct (MSL 5.2.1)
#include <metal_stdlib>
using namespace metal;
kernel void k(
    constant float* device* x [[buffer(0)]]) { // HERE
  x[0] = x[1];
}
