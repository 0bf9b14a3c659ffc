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

// --- forms | accepted (certain) | MSL 4.4 | Threadgroup variables can be arrays, structs and aligned, in nested scopes too.
struct alignas(16) Sh {
  float a[4];
  int n;
};
template <typename T, int N>
void fill(threadgroup T (&t)[N], ushort i) {
  if (i < N) t[i] = T(i);
}
kernel void k(device float* o [[buffer(0)]], ushort i [[thread_index_in_threadgroup]]) {
  threadgroup float a[2][32], b[16];
  alignas(16) threadgroup char raw[64];
  threadgroup Sh s;
  fill(b, i);
  a[1][i] = i;
  s.n = 1;
  raw[i] = 1;
  for (int j = 0; j < 2; j++) {
    threadgroup float c[8];
    c[j] = 1;
    o[i] = c[j];
  }
  threadgroup float* p = (threadgroup float*)raw;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] += a[1][i] + b[0] + p[0] + s.n;
}

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

// --- casts | accepted (certain) | MSL 4.4 | A threadgroup pointer can be cast to another type in the same address space.
kernel void k(device float4* x [[buffer(0)]], threadgroup half* s [[threadgroup(0)]]) { threadgroup half4* s4=(threadgroup half4*)s; s4[1]=half4(x[0]); threadgroup float* f=(threadgroup float*)(s+64); f[0]=1; x[1]=float4(s4[1])+f[0]; }
