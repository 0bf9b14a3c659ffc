// certain: locals and parameters named like members of a device function (MSL specification 4, member functions qualified with an address space; MLX steel/attn)
#include <metal_stdlib>
using namespace metal;
struct S {
  float a, b;
  int n[3];
  thread float* p;
  float f(float a) device {
    float b = a + this->b;
    {
      int n = 2;
      b += n;
    }
    return b + this->n[1];
  }
  void g() device {
    a = 1;
    n[0] += 2;
    f(3);
  }
};
kernel void k(device S* o [[buffer(0)]]) { o[0].g(); }
