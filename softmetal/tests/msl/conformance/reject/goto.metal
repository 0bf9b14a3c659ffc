// certain: goto (MSL specification 1.5, what C++ has and Metal has not)
#include <metal_stdlib>
using namespace metal;
kernel void k(device int* o [[buffer(0)]]) {
  if (o[0]) goto end;  // HERE
  o[0] = 1;
end:
  o[1] = 2;
}
