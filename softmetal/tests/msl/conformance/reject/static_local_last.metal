// certain: static variables reside in constant memory (MSL 4.2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x) {
  int static i; x[0] = i;  // HERE
}
