// certain: twin of the refused programs: static variables reside in constant memory (MSL 4.2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x) {
  const static constant int a = 1;
  static constant int b[2] = {1, 2};
  struct L { static int f(int v) { return v + 1; } };
  x[0] = a + b[x[1]] + L::f(x[2]);
}
