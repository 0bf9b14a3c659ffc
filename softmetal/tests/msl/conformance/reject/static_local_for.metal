// certain: static variables reside in constant memory (MSL 4.2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x) {
  for (static int i = 0; i < 2; i++) x[i] = i;  // HERE
}
