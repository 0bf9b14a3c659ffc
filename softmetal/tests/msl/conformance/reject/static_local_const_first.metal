// certain: static variables reside in constant memory (MSL 4.2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x) {
  const static int i = 0; x[0] = i;  // HERE
}
