// certain: static variables reside in constant memory (MSL 4.2)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* x) {
  switch (x[0]) { case 1: static int i; x[0] = i; }  // HERE
}
