// Declarations of pointers and references. The format of this file: ../catalogue.py

// --- setup
kernel void k(device float* x [[buffer(0)]], device int* n [[buffer(1)]], device float4* v [[buffer(2)]],
              threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(3)]]) {

// --- local_pointers | rejected (certain) | MSL 4; slang #4129 | A pointer needs an address space.
  float* y = x + 1;  // error
  float4* p = v;  // error: needs an address space
  x[0] = *reinterpret_cast<int*>(x);  // error
  *(int*)x = 1;  // error: needs an address space
  float a = 1, *p = &a;  // error
  float device* y = x + 1;  // accepted
  auto p = v;  // accepted
  p[0] = v[1] * *(device int*)y;  // accepted

// --- declarations | rejected (certain) | MSL 4; slang #4129; llama.cpp #3898 | A pointer or reference needs an address space wherever it is declared.
struct S { float* x; };  // error: needs an address space
float f(const float* x) { return x[0]; }  // error: the pointer type 'const float*' needs an address space
float f(int, float*) { return 1; }  // error
float* f(device float* x) { return x; }  // error
void f(float * a, float * b) { *a = *b; }  // error
using P = float*;  // error
template <typename T = float*> struct S { int x; };  // error
struct S { int& a; };  // error
void f(float& a) { a = 1; }  // error
template <typename T> void f(int i, T& x) { x = i; }  // error: the reference type 'T&' needs an address space
int& f(thread int& x) { return x; }  // error
template <typename T> using R = T&;  // error
struct S { device float* x; };  // accepted
float f(const device float* x) { return x[0]; }  // accepted
void f(thread float * a, thread float * b) { *a = *b; }  // accepted
template <typename T> void f(int i, thread T& x) { x = i * sizeof(T) & i; }  // accepted
// --- template_argument_of_two | rejected
template <typename T, typename U> struct S { int x; };
kernel void k(device float* o [[buffer(0)]]) {
  S<float*, int> s;  // error
  o[0] = s.x; }
// --- template_argument | rejected (likely)
template <typename T> struct B { T v; };
kernel void k(device float* x [[buffer(0)]]) { B<float*> b; x[0]=1; }  // error
// --- second_declarator_of_typedef | rejected
typedef struct S { int a; } S, *PS;  // error
kernel void k(device S* x) { x[0].a = 1; }  // rejected
typedef struct S { int a, b; } S, S4[4];  // accepted
typedef device S *PS, *QS;  // accepted
float f(int a) { float b = a, c(2), d = b * c; return d; }  // accepted
kernel void k(device S* x) { PS p = x; QS q = p; S4 s; s[0].a = f(1); q->a = s[0].a; }  // accepted

// --- aliases_with_address_space | accepted (certain) | MSL 4 | An alias can name a pointer with its address space; a product is not a pointer.
using P = device float*;
typedef const constant int* Q;
template <typename T = threadgroup float*, typename U = int> struct S { T p; U u; };
template <typename T> using R = thread T&;
float f(R<float> x, device float*, int = 2) { return x; }
kernel void k(P o [[buffer(0)]], Q q [[buffer(1)]]) {
  float y = 2;
  int half_ = 3;
  int z = half_ * q[0];
  S<device float*, int> s = {o, z};
  o[0] = f(y, s.p) * z;
}

// --- cast_through_typedef | rejected (certain) | MSL 4; hashcat #4237 | The pointer type of a cast needs an address space.
typedef uint u32;
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  float y[4];
  x[0] = *(u32 *)y;  // error
  x[0] = *(thread u32 *)y;  // accepted
}
// --- auto_reference | rejected
  auto& p = v[0];  // error: needs an address space
  device auto& p = v[0];  // accepted
  p = 1;
