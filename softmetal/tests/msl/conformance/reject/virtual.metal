// certain: virtual function (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
struct S {
  virtual int f() { return 1; }  // HERE
};
kernel void k(device int* o [[buffer(0)]]) {
  S s;
  o[0] = s.f();
}
