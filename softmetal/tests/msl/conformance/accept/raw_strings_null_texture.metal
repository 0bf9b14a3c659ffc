// certain: raw string literals (C++ [lex.string]); is_null_texture (MSL 6.12)
#include <metal_stdlib>
using namespace metal;
constant bool has [[function_constant(0)]];
kernel void k(texture2d<float> t [[texture(0), function_constant(has)]], device float4* o [[buffer(0)]]) {
  constant char* s = R"x(a"b{)" )x";
  if (has && !is_null_texture(t)) o[0] = s[1];
}
