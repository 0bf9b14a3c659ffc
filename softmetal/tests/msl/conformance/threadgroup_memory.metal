// Threadgroup variables. The format of this file: ../catalogue.py

// --- setup
struct C { float a; C() : a(1) {} };
struct I { float a = 1; };
struct M { float4x4 m; };
struct V { float4 m[4]; };
kernel void k(device float* x) {

// --- in_function | rejected (certain) | MSL 4.4 | A threadgroup variable must be declared in a kernel.
void f(device float* x) {  // rejected
  threadgroup float y[4];  // error: must be declared in a kernel function
  y[0] = x[0];  // rejected
void f(device float* x, threadgroup float* y) { y[0] = x[0]; }  // accepted
kernel void k(device float* x [[buffer(0)]]) {  // accepted
  threadgroup float y[4];  // accepted
  f(x, y);  // accepted
}
kernel void k(device float* x [[buffer(0)]]) { f(x); }  // rejected
// --- in_member_function | rejected
struct S { void f(device float* x) { threadgroup float t[4]; t[0]=x[0]; x[1]=t[0]; } };  // error
kernel void k(device float* x [[buffer(0)]]) { S s; s.f(x); }

// --- initialised_by_int | rejected (certain) | MSL 4.4 | A threadgroup variable cannot have an initialiser.
  threadgroup float y = 1;  // error: cannot have an initialiser

// --- initialised_by_nonzero | rejected (likely) | MSL 4.4 | A threadgroup variable cannot have an initialiser other than zero.
  threadgroup float a = 0, b = 2;  // error

// --- initialised_by_zero | accepted (likely) | public sources; the memory is still undefined | A threadgroup variable can be initialised with zero.
template <typename T>
kernel void k(device T* o [[buffer(0)]], ushort i [[thread_index_in_threadgroup]]) {
  threadgroup float x = 0.0f;
  threadgroup uint a = 0, b[2] = {0, 0}, c = 0u;
  threadgroup float4 v = float4(0.0f);
  threadgroup T t = T(0);
  threadgroup half h[4]{};
  threadgroup bool any = false;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 0) x = 1, a = b[1] = c = 2, v = 3, t = 4, h[0] = 5, any = true;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = T(x + a + b[1] + c + v.x) + t + T(h[0]) + T(any);
}
template [[host_name("k_float")]] kernel void k<float>(device float*, ushort);

// --- constructors | rejected (likely) | MSL 4.4 | Threadgroup memory runs no constructor and no member initialiser.
  threadgroup C s;  // error
  threadgroup I s[2];  // error

// --- threadgroup_constructor | accepted (certain) | MLX complex.h | A default constructor qualified `threadgroup` can initialise objects in threadgroup memory.
struct S { float a; S() : a(0) {} S() threadgroup {} };
kernel void k(device float* x [[buffer(0)]]) { threadgroup S s[2]; s[0].a = x[0]; x[1] = s[0].a; }

// --- matrices | rejected (certain) | llama.cpp #26646 | A matrix in threadgroup memory has no default constructor.
  threadgroup half4x4 t[2];  // error
  threadgroup M s;  // error
  threadgroup V s;  // accepted
  s.m[0] = x[0];  // accepted
