// likely: attributes that the compiler does not know are ignored with a warning, wherever they are (C++ [dcl.attr.grammar])
#include <metal_stdlib>
using namespace metal;
[[vendor::hot]] float f(float x [[foo]], float y [[maybe_unused]]) [[bar]] { return x; }
struct S { float x [[foo]]; };
kernel void k(device S* o [[buffer(0), foo]], constant float& c [[foo]] [[buffer(1)]],
              uint i [[thread_position_in_grid]] [[foo, bar(2)]]) [[foo]] {
  [[foo]] float y = f(c, 1) * 2;
  o[i].x = y;
}
