// Program scope and constant memory. The format of this file: ../catalogue.py

// --- variables | rejected (certain) | MSL 4.2, 4.4; slang #4373 | A variable at program scope must be in constant memory, with an initialiser.
int counter = 0;  // error: 'counter' must reside in the constant address space
const float scale = 2.0f;  // error
constexpr int n = 3;  // error: 'n' must reside in the constant address space
static const float table[2] = {1, 2};  // error
threadgroup float x[4];  // error: 'x' must reside in the constant address space
constant int y;  // error
constant int counter = 0;  // accepted
constexpr constant int n = 3;  // accepted
constant float table[2] = {1, 2};  // accepted

// --- runtime_initialiser | rejected (certain) | MSL 4.2 | The initialiser of a constant at program scope must be a constant expression.
float f(float a) { return a * a; }  // rejected
constant float table[2] = {1, f(3)};  // error
constexpr float f(float a) { return a * a; }  // accepted
constant float table[2] = {1, f(3)};  // accepted
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = table[1]; }

// --- constant_as_bound_and_argument | accepted (certain) | MSL 4.2 | A `constant constexpr` in a namespace can be an array bound or a template argument.
namespace n { constant constexpr int A = 4; template <int N> int f() { return N; } }
kernel void k(device int* x [[buffer(0)]]) { threadgroup int t[n::A*2]; t[0]=n::f<n::A>(); int l[n::A]={}; x[0]=t[0]+l[0]; }

// --- setup
struct P { float a; };
constant float a[2] = {1, 2};
kernel void k(device float* x, device int* n, constant float* c, constant P& p) {

// --- written | rejected (certain) | MSL 4.2 | Constant memory is read-only.
  a[0] = 1;  // error
  c[0] = 1;  // error: read-only
  p.a = 1;  // error
  x[0] = a[0] + c[0] + p.a;  // accepted

// --- string_literal | rejected (certain) | MSL 4.2 | A string literal is in constant memory.
  const thread char* s = "ab";  // error
  const constant char* s = "ab";  // accepted
  x[0] = s[0];

// --- static_member_unused | rejected (certain) | MSL 4.2 | A static member must be in constant memory.
struct S {
  static constexpr int n = 3;  // error: 'n' must reside in the constant address space
  static constexpr constant int n = 3;  // accepted
  int m;  // accepted
};

// --- static_local | rejected (certain) | MSL 4.2 | A static local variable must be in constant memory.
kernel void k(device float* o [[buffer(0)]]) {  // rejected
  static int n = 0;  // error
  n++;  // rejected
  o[0] = n;  // rejected
kernel void k(device int* x) {  // accepted
  const static constant int a = 1;  // accepted
  static constant int b[2] = {1, 2};  // accepted
  struct L { static int f(int v) { return v + 1; } };  // accepted
  x[0] = a + b[x[1]] + L::f(x[2]);  // accepted
}
// --- static_local_in_case | rejected
  switch (n[0]) { case 1: static int i; n[0] = i; }  // error

// --- extern_constant | rejected (likely) | MSL 4.2: constant memory is initialised where it is declared | A variable cannot be extern.
extern constant int n;  // error
kernel void k(device int* o [[buffer(0)]]) { o[0] = n; }
// --- extern_local | rejected
kernel void k(device int* o [[buffer(0)]]) {
  extern constant int n;  // error
  o[0] = n; }

// --- extern_functions | accepted (likely) | Core Image | Functions can be extern and extern "C".
extern float f(float x);
extern "C" { namespace coreimage_like { float g(float x) { return x; } } }
float f(float x) { return x + coreimage_like::g(x); }
kernel void k(device float* o [[buffer(0)]]) { o[0] = f(o[1]); }
