// certain: member pointer without address space (MSL specification 4, address spaces; MLX, llama.cpp)
#include <metal_stdlib>
using namespace metal;
struct S {
  float* p;  // HERE
};
kernel void k(device float* a [[buffer(0)]]) {
  S s;
  s.p = nullptr;
  a[0] = 1;
}
