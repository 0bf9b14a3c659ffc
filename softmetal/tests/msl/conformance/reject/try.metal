// certain: exceptions (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* o [[buffer(0)]]) {
  try {  // HERE
    o[0] = 1;
  } catch (...) {
  }
}
