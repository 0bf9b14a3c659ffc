// Textures, samplers, function tables, argument buffers and other stages. The format of this file: ../catalogue.py

// --- setup
struct M { depth2d<float> t; int x; };
float4 f(texture2d<float> t) { return t.read(uint2(0)); }
kernel void k(texture2d<float> t [[texture(0)]], device float4* o) {
  o[1] = f(t);

// --- values | rejected (likely) | MSL 2.9, 2.10 | A texture needs a value, and a sampler must be constexpr or a parameter.
  texture2d<float> u;  // error
  M m;  // error
  o[0] = f(texture2d<float>());  // error
  sampler s(filter::linear);  // error
  sampler s;  // error
  o[0] = t.sample(sampler(filter::linear), float2(0));  // error

// --- samplers | accepted (certain) | MSL 2.10 | A sampler can be constexpr, local or at program scope, or a parameter.
constexpr sampler linear(coord::normalized, filter::linear);
constexpr constant sampler nearest(filter::nearest);
struct Bound { texture2d<float> t [[id(0)]]; sampler s [[id(1)]]; array<texture2d<float>, 4> more [[id(2)]]; device float* p [[id(6)]]; };
float4 f(texture2d<float> t, sampler s) { return t.sample(s, float2(0)); }
kernel void k(texture2d<float> t [[texture(0)]], sampler given [[sampler(0)]], device float4* o [[buffer(0)]]) {
  constexpr sampler own(address::repeat);
  texture2d<float> same = t;
  o[0] = f(t, own) + f(same, given) + f(t, linear) + f(t, nearest);
}

// --- null_texture | accepted (certain) | MSL 6.12; C++ [lex.string] | The library has is_null_texture; string literals can be raw.
constant bool has [[function_constant(0)]];
kernel void k(texture2d<float> t [[texture(0), function_constant(has)]], device float4* o [[buffer(0)]]) {
  constant char* s = R"x(a"b{)" )x";
  if (has && !is_null_texture(t)) o[0] = s[1];
}

// --- function_tables | rejected (certain) | MSL 2.15 | A table of visible functions is a parameter, and its functions take the arguments of its type.
[[visible]] int twice(int x) { return 2 * x; }
int call(visible_function_table<int(int)> table, int x) { return table.empty() ? twice(x) : table[0](x); }
kernel void k(visible_function_table<int(int)> table [[buffer(0)]], device int* o) {
  visible_function_table<int(int)> other;  // error
  o[1] = table[1](o[1], 2);  // error
  o[0] = is_null_visible_function_table(table) ? 0 : call(table, o[0]);  // accepted
}

// --- id_twice | rejected (certain) | MSL 2.13 | Two members of an argument buffer cannot have one id.
struct S { device float* a [[id(1)]];
  device float* b [[id(1)]]; };  // error
kernel void k(constant S& s [[buffer(0)]]) { s.a[0] = s.b[0]; }

// --- id_in_array | rejected (likely) | MSL 2.13 | An array takes one id per element.
struct S { array<texture2d<float>, 4> a [[id(0)]];
  device float* b [[id(3)]]; };  // error
kernel void k(constant S& s [[buffer(0)]]) { s.b[0] = 1; }

// --- other_stages | accepted (certain) | MSL 5.1 | A program with a kernel can contain vertex and fragment functions.
struct In { float3 position [[attribute(0)]]; float2 uv [[attribute(1)]]; };
struct Out { float4 position [[position]]; float2 uv [[user(uv)]]; float size [[point_size]]; };
struct Pixel { float4 color [[color(0)]]; float depth [[depth(any)]]; };
vertex Out v(In in [[stage_in]], constant float4x4& m [[buffer(1)]], uint id [[vertex_id]]) {
  Out out;
  out.position = m * float4(in.position, 1);
  out.uv = in.uv;
  return out;
}
fragment Pixel f(Out in [[stage_in]], texture2d<float> t [[texture(0)]], bool front [[front_facing]]) {
  constexpr sampler s(filter::linear);
  if (in.uv.x < 0) discard_fragment();
  return {t.sample(s, in.uv) + dfdx(in.uv.x), 0.5f};
}
[[vertex]] float4 g(uint id [[vertex_id]]);
[[fragment]] half4 h(float4 p [[position]]) { return half4(p); }
template <typename T> fragment T tf(float4 p [[position]]) { return T(p); }
template [[host_name("tf")]] fragment float4 tf<float4>(float4 p [[position]]);
kernel void k(device Out* o [[buffer(0)]], uint vertex_count [[thread_position_in_grid]]) { o[vertex_count].size = 1; }

// --- functions_of_other_stages | accepted (certain) | MSL 6.10; MSL 6.20 | A program with a kernel can contain functions that only other stages may call.
struct V { float4 at [[position]]; float2 uv; };
struct I { float4 at [[position]]; interpolant<float2, interpolation::perspective> uv; };
struct Payload { uint n[4]; };
using M = metal::mesh<V, void, 32, 16, topology::triangle>;
static float4 shade(float2 uv) { return float4(dfdx(uv), dfdy(uv)) * fwidth(uv.x); }
static void kill(float a) { if (a < 0) discard_fragment(); }
void fill(object_data Payload* p, mesh_grid_properties g) { p->n[0] = 1; g.set_threadgroups_per_grid(uint3(1)); }
static void emit(M m, V v) { m.set_vertex(0, v); m.set_primitive_count(1); }
fragment float4 fs(V in [[stage_in]]) { kill(in.uv.x); return shade(in.uv); }
kernel void k(device float* o [[buffer(0)]]) { o[0] = 1; }
