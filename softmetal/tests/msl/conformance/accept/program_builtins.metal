// certain: built-in variables at program scope (MSL specification 3.1, 5.2.3.6 and 5.9)
#include <metal_stdlib>
using namespace metal;
uint2 place [[thread_position_in_grid]];
ushort lane [[thread_index_in_simdgroup]];
namespace inner { uint3 group [[threadgroup_position_in_grid]]; }
struct S { uint lane; };
float2 f() { return float2(place) + (float2)place; }
kernel void a(device float* o [[buffer(0)]]) { o[place.x] = f().x + lane + inner::group.z; }
kernel void b(device float* o [[buffer(0)]], uint lane [[thread_index_in_threadgroup]]) {
  S s = {lane};
  o[lane] = s.lane;
  uint place = 3;
  o[place] = place;
}
