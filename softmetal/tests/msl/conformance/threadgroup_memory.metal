// Threadgroup variables. The format of this file: ../catalogue.py

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
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup float y = 1;  // error: cannot have an initialiser
  threadgroup float y;  // accepted
  y = 1;  // accepted
  x[0] = y;
}

// --- initialised_by_nonzero | rejected (likely) | MSL 4.4 | A threadgroup variable cannot have an initialiser other than zero.
kernel void k(device float* o [[buffer(0)]]) {
  threadgroup float a = 0, b = 2;  // error
  o[0] = a + b; }

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

// --- constructor | rejected (likely) | MSL 4.4 | Threadgroup memory runs no constructor.
struct S { float a; S() : a(1) {} };
kernel void k(device float* x [[buffer(0)]]) { threadgroup S s; x[0]=s.a; }  // error

// --- threadgroup_constructor | accepted (certain) | MLX complex.h | A default constructor qualified `threadgroup` can initialise objects in threadgroup memory.
struct S { float a; S() : a(0) {} S() threadgroup {} };
kernel void k(device float* x [[buffer(0)]]) { threadgroup S s[2]; s[0].a = x[0]; x[1] = s[0].a; }

// --- member_initialiser | rejected (likely) | MSL 4.4 | Threadgroup memory runs no member initialiser.
struct S { float a = 1; };  // rejected
struct S { float a; };  // accepted
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup S s[2];  // error
  threadgroup S s[2];  // accepted
  s[0].a = 1;  // accepted
  x[0] = s[0].a;
}

// --- matrix | rejected (certain) | llama.cpp #26646 | A matrix in threadgroup memory has no default constructor.
kernel void k(device float* x [[buffer(0)]]) { threadgroup half4x4 t[2]; t[0][0]=half4(1); x[0]=t[0][0][0]; }  // error
// --- matrix_member | rejected
struct S { float4x4 m; };  // rejected
struct S { float4 m[4]; };  // accepted
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup S s;  // error
  threadgroup S s;  // accepted
  x[0] = s.m[0][0];
}
