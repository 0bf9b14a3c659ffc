// certain: static variables reside in constant memory (MSL 4.2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x) {
  if (x[0]) static int i = 1;  // HERE
}
