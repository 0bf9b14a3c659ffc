// likely: static member functions of a local struct (C++ [class.local])
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* o [[buffer(0)]]) {
  struct S {
    int x;
    static int f(int y) { return y + 1; }
    static constexpr int g() { return 3; }
    int h() const { return f(x); }
  };
  static constant int n = 2;
  S s = {o[1]};
  o[0] = S::f(n) + S::g() + s.h();
}
