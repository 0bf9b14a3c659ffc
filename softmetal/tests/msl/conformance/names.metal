// Keywords and names of the library. The format of this file: ../catalogue.py

// --- setup
kernel void k(device float* x [[buffer(0)]], device int* n [[buffer(1)]], device float4* v [[buffer(2)]],
              threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(3)]]) {

// --- variables | rejected (certain) | MSL 4, 5.1; crosstl #1140, #1159; SPIRV-Cross #2073; naga #264 | A variable cannot have the name of a keyword.
  float kernel = x[0];  // error
  float constant = 1;  // error
  float4 fragment = v[0];  // error
  float half = 1;  // error
  float device = x[0];  // error
  uint thread = 1;  // error
  float3 new = float3(1);  // error
// --- parameter_thread | rejected
kernel void k(device float* o [[buffer(0)]], uint thread [[thread_position_in_grid]]) { o[0] = 1; }  // error

// --- parameter_fragment | rejected (certain) | MSL 5.1 | A parameter cannot have the name of a keyword.
template <typename T> inline void set_elements(thread simdgroup_matrix<T,8,8>& fragment, T v) { fragment.thread_elements()[0] = v; }  // error
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 m; set_elements(m, 1.0f); x[0] = m.thread_elements()[0]; }

// --- member_thread | rejected (certain) | SPIRV-Cross #2073 | A member cannot have the name of a keyword.
struct S {
  float thread;  // error
  float threads;  // accepted
};
kernel void k(device float* x [[buffer(0)]]) { x[0] = 1; }

// --- struct_kernel | rejected (certain) | MSL 5.1 | A type cannot have the name of a keyword.
struct kernel {  // error
struct kernel_ {  // accepted
  float a;
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = 1; }

// --- struct_complex | rejected (certain) | metal_types; naga #702 | `complex` is a name of metal_types and cannot be redefined at program scope.
struct complex { float re, im; };  // error
kernel void k(device complex* x [[buffer(0)]]) { x[0].re = 1; }
// --- alias_complex | rejected (likely)
namespace numbers {
using complex = float2;
}  // namespace numbers
using complex = float2;  // error
kernel void k(device complex* x [[buffer(0)]]) { x[0].x = 1; }

// --- complex_in_namespace | accepted (certain) | c10/metal/common.h of torch 2.15 | A namespace can declare a type with a name of metal_types.
namespace numbers {
template <typename T>
using complex = ::metal::vec<T, 2>;
struct quad { float a, b, c, d; };
}  // namespace numbers
kernel void k(device float* x [[buffer(0)]]) {
  numbers::complex<float> z = float2(1.0f, 2.0f);
  numbers::quad q = {z.x, z.y, 0, 0};
  x[0] = q.a + q.b;
}

// --- variable_of_function_name | rejected (certain) | SPIRV-Cross #486 | A variable hides the function of its name.
  float dot = dot(float2(1), float2(2));  // error
  x[0] = dot;  // rejected
  float d = dot(float2(1), float2(2));  // accepted
  x[0] = d;  // accepted

// --- names_of_library_functions | accepted (likely) | crosstl #1140 | Variables can have the names of library functions and attributes.
float square(float dot) { return dot * dot; }
kernel void k(device float* o, uint i [[thread_position_in_grid]]) {
  float max = 2, length = 3, sample = 1, buffer = 1, texture = 2, stage_in = 1;
  o[i] = square(max) + length + sample + buffer + texture + stage_in;
}

// --- function_the_library_lacks | accepted (likely) | SPIRV-Cross #2228 | A program can define functions with names that the library does not use.
float3 portion(float3 a, float3 b) { return a / b; }
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = portion(float3(1), float3(2)).x; }

// --- namespaces | accepted (certain) | MSL 1.5; MLX, llama.cpp | Namespaces, namespace aliases, using and typedef work as in C++.
namespace a {
namespace b {
constant int x = 1;
inline float f(float y) { return y; }
}  // namespace b
namespace c = b;
using namespace b;
typedef half4 h4;
using F = float;
}  // namespace a
namespace m = metal;
using m::max;
kernel void k(device float* o [[buffer(0)]]) {
  a::h4 h = 1;
  a::F f = a::c::f(2) + a::x;
  o[0] = max(f, float(h.x)) + metal::fmax(1.0f, 2.0f) + metal::precise::exp(1.0f) + fast::log(2.0f);
}

// --- scopes_of_types | accepted (certain) | C++ [basic.scope] | Outside of its scope, the name of an alias or type parameter can name anything.
using item = float2;
template <typename T> T twice(T x) { return T(x) + (T)x; }
struct Types { using element = float4; element first() { return element(1, 2, 3, 4); } };
struct Derived : Types { float4 second() { return element(1, item(2, 3), 4); } };
struct Values { float x, T; Values(float y) : x(y), T(y) {} thread float& element(int) thread { return x; } float item() { return element(0) + (T) - 1; } };
kernel void k(device float* o) {
  Values values(1);
  values.element(0) = twice(2.0f);
  o[0] = values.item() + Types().first().x + Derived().second().y;
}
