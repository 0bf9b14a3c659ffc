// certain: thread_local (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* o [[buffer(0)]]) {
  thread_local int x = 1;  // HERE
  o[0] = x;
}
