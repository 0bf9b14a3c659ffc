// Features of C++ that Metal lacks. The format of this file: ../catalogue.py

// --- setup
kernel void k(device float* x [[buffer(0)]], device int* n [[buffer(1)]], device float4* v [[buffer(2)]],
              threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(3)]]) {

// --- words | rejected (certain) | MSL 1.5, 1.5.4, 2.1 | Metal lacks some words of C++.
  double y = x[0];  // error: no double
  x[0] = 1.0L;  // error: no long double
  x[0] = 1e3L;  // error: no long double
  char8_t y = 1;  // error: no char8_t
  thread int* p = new int;  // error: no new
  delete n;  // error: no delete
  try { }  // error: no exceptions
  throw 1;  // error: no exceptions
  goto end;  // error: no goto
  struct V { virtual int f() { return 1; } };  // error: no virtual functions
  dynamic_cast<device int*>(n);  // error: run-time type
  auto& t = typeid(int);  // error: run-time type
  thread_local int y = 1;  // error: no thread_local
  struct S { S() = delete; };  // accepted

// --- likely_words | rejected (likely) | MSL 1.5.4, 2.1 | Metal lacks long long, register variables and inline assembly.
  long long y = 1;  // error
  register int y = 1;  // error
  asm("nop");  // error

// --- wide_character | rejected (policy) | MSL 1.5.4 | Metal has no wide characters and strings.
  n[0] = L'a';  // error
  n[0] = 'a';  // accepted

// --- virtual_base | rejected (certain) | MSL 1.5.4 | Metal has no virtual base classes.
struct A { int a; };
struct B : virtual A { int b; };  // error
kernel void k(device int* x [[buffer(0)]]) { B b; b.a=1; x[0]=b.a; }

// --- noexcept_operator | rejected (policy) | MSL 1.5.4 | Metal has no noexcept operator.
kernel void k(device int* x [[buffer(0)]]) { x[0]=noexcept(x[0]+1); }  // error

// --- recursion | rejected (certain) | MSL 1.5.4 | Recursion is not allowed.
int f(int n) {  // error: 'f' calls itself
  return n < 2 ? n : f(n - 1) + f(n - 2);  // rejected
}  // rejected
kernel void k(device int* x [[buffer(0)]]) { x[0] = f(x[0]); }  // rejected
template <int n> int f() { return f<n - 1>() + 1; }  // accepted
template <> int f<0>() { return 0; }  // accepted
kernel void k(device int* x [[buffer(0)]]) { x[0] = f<4>(); }  // accepted
// --- recursion_of_template | rejected
template <typename T> T f(T n) { return n > 0 ? f(n-1) : n; }  // error
kernel void k(device int* x [[buffer(0)]]) { x[0]=f(x[1]); }
// --- recursion_of_two | rejected
int g(int n);  // rejected
int f(int n) { return n < 1 ? 0 : g(n - 1); }  // error: 'f' calls itself
int g(int n) { return f(n) + 1; }  // rejected
int f(float n) { return n; }  // accepted
int f(int n) { return f(float(n)); }  // accepted
kernel void k(device int* x [[buffer(0)]]) { x[0] = f(x[0]); }

// --- function_pointer | rejected (certain) | MSL 1.5.4 | Metal has no pointers to functions.
float f(float x) { return x; }
kernel void k(device float* o [[buffer(0)]]) {
  float (*p)(float) = f;  // error
  o[0] = p(1);
}
// --- function_pointer_parameter | rejected (likely)
float g(float a) { return a; }
float f(  // rejected
    float (*h)(float), float a) {  // error
template <float (*h)(float)> float f(float a) {  // accepted
  return h(a);
}
kernel void k(device float* x [[buffer(0)]]) { x[0] = f(g, 1); }  // rejected
kernel void k(device float* x [[buffer(0)]]) { x[0] = f<g>(1); }  // accepted

// --- variadic_function | rejected (policy) | MSL 1.5.2 | A variadic function must be a template.
int f(int n, ...) { return n; }  // error
template <typename... T> int f(int n, T...) { return n; }  // accepted
kernel void k(device int* x [[buffer(0)]]) { x[0] = f(1, 2); }

// --- variable_length_array | rejected (certain) | MSL 1.5: C++14 | An array bound must be a constant expression.
  int y[n[0]];  // error: variable length arrays
  int y[4];  // accepted
  n[0] = y[0];

// --- lambda | rejected (certain) | MSL 3.2, 1.5.4 | Lambda expressions need MSL 3.2.
struct F {  // accepted
  float operator()(float y) { return y; }  // accepted
};  // accepted
kernel void k(device float* x) {
  auto f = [](float y) { return y; };  // error: no lambda expressions
  x[0] = f(1);  // rejected
  F f;  // accepted
  x[0] = f(x[1]);  // accepted
}

// --- class_template_deduction | rejected (certain) | MSL 4.0, 1.5 | Class template argument deduction (C++17) needs MSL 4.0.
template <typename T> struct S { T x; S(T y) : x(y) {} };
int f() {
  S s(1);  // error: template arguments
  S<int> s(1);  // accepted
  return s.x;
}

// --- cpp_header | rejected (certain) | MSL 1.5 | Metal has no C++ standard library.
#include <vector>  // error: 'vector' is not a header of Metal
#include <metal_math>  // accepted
// --- namespace_std | rejected
  x[0] = std::max(x[0], x[1]);  // error: no namespace std
  x[0] = metal::max(x[0], x[1]);  // accepted

// --- c_header | rejected (certain) | MSL 1.5 | Metal has no C library.
#include <math.h>  // error: 'math.h' is not a header of Metal
#include <simd/simd.h>  // accepted

// --- without_using_directive | rejected (certain) | MSL 1.5 | The library is in namespace metal and needs a using directive or a qualified name.
#include <metal_stdlib>
kernel void k(device float* x [[buffer(0)]]) { x[0]=max(x[0],x[1]); }  // error
