// Conversions between address spaces, and values in them. The format of this file: ../catalogue.py

// --- setup
kernel void k(device float* x [[buffer(0)]], device int* n [[buffer(1)]], device float4* v [[buffer(2)]],
              threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(3)]]) {

// --- pointers | rejected (certain) | MSL 4; SPIRV-Cross #2064 | A pointer does not convert to another address space.
  float y = 0;
  thread float* to = &y;
  threadgroup float* p = x;  // error: cannot initialize a variable of type 'threadgroup float *'
  thread float* p = t;  // error
  thread auto* p = x;  // error
  to = x;  // error
  device auto* p = x;  // accepted
  *to = *p + *t;  // accepted
// --- assigned_member_pointer | rejected
struct S { thread float* p; };  // rejected
struct S { device float* p; };  // accepted
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  S s;
  s.p = x;  // error
  s.p = x;  // accepted
  s.p[0] = 1;
}
// --- aggregate_member_pointer | rejected
struct S { thread float* p; };  // rejected
struct S { threadgroup float* p; };  // accepted
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  S s = {t};  // error
  S s = {t};  // accepted
  x[0] = s.p[0];
}
// --- member_of_template | rejected
template <typename T>
struct Loader {
  threadgroup T* to;  // rejected
  const device T* to;  // accepted
  const device T* from;
  void go() { to = from; }  // error: assigning 'const device float *'
  void go() { to = from; }  // accepted
};
kernel void k(device float* x [[buffer(0)]]) {
  Loader<float> loader;
  loader.from = x;
  loader.go();
}

// --- pointers_to_device_pointers | accepted (likely) | MSL 4; MLX, llama.cpp | A thread pointer or reference can refer to a device pointer.
void advance(thread device float*& p, uint n) { p += n; }
void advance2(device float* thread& p, uint n) { p += n; }
void advance3(device float* thread* p, uint n) { *p += n; }
kernel void k(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  advance2(a, i);
  advance3(&a, 1);
  *a = 1;
}

// --- array_of_device_pointers | accepted (likely) | MSL 4; MLX, llama.cpp | A thread array can hold device pointers.
kernel void k(device float* a [[buffer(0)]], device float* b [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  device float* p[2] = {a, b};
  device float* const* q = p;
  p[i & 1][i] = q[0][1];
}

// --- casts | rejected (certain) | MSL 4; MLX, llama.cpp | A cast cannot change the address space.
  float y = 0;
  threadgroup int* p = (threadgroup int*)x;  // error: a cast cannot change the address space of a pointer
  *(threadgroup int*)(x + 1) = 0;  // error: a cast cannot change the address space of a pointer
  thread float* p = (thread float*)x;  // error: a cast cannot change the address space of a pointer
  reinterpret_cast<threadgroup int*>(x)[0] = 1;  // error: reinterpret_cast from 'device float *' to 'threadgroup int *' is not allowed
  device int* p = (device int*)x;  // accepted
  *(device int*)(x + 1) = *p + *(thread float*)&y;  // accepted
  reinterpret_cast<device int*>(x)[0] = 1;  // accepted
// --- const_cast | rejected
kernel void k(constant float* c [[buffer(0)]], device float* x [[buffer(1)]]) { device float* p = const_cast<device float*>(c); p[0]=1; x[0]=p[0]; }  // error

// --- returned_device_reference | rejected (certain) | MSL 4; MLX, llama.cpp | A reference to thread memory does not bind to an object in another address space.
thread float& f(device float* p) {  // rejected
  return p[1];  // error
device float& f(device float* p) {  // accepted
  return p[1];  // accepted
}
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { f(x) = 1; }

// --- temporary_as_const_reference | accepted (certain) | MSL 4; MLX, llama.cpp | A temporary binds to a const reference to thread memory.
float f(const thread float& a) { return a; }
float g(thread const float4& a) { return a.x; }
kernel void k(device float* o [[buffer(0)]]) { o[0] = f(2.0f) + g(float4(1)); }

// --- converted_value_as_const_reference | accepted (certain) | C++ [dcl.init.ref] | A const thread reference binds to a temporary that is converted from a value in any memory.
float f(const thread float& a) { return a; }
kernel void k(device float* x [[buffer(0)]], device int* n [[buffer(1)]]) {
  x[0] = f(n[0]) + f(x[1] + 1);
}

// --- references_to_arrays | accepted (certain) | MSL 4; MLX, llama.cpp | References and pointers to arrays can have any address space.
template <int N>
float s(thread const float (&a)[N]) {
  float t = 0;
  for (int i = 0; i < N; i++) t += a[i];
  return t;
}
float d(device float (*m)[4], int i) { return m[i][2]; }
kernel void k(device float* o [[buffer(0)]]) {
  float a[3] = {1, 2, 3};
  device float(*m)[4] = (device float(*)[4])o;
  o[0] = s(a) + d(m, 1);
  thread auto& r = a;
  r[0] = 1;
  device auto& q = o[1];
  q = r[0];
}

// --- overloads_by_space | accepted (certain) | MSL 1.5.1 | Functions can be overloaded on the address spaces of their parameters.
void f(thread float& a) { a = 1; }
void f(device float& a) { a = 2; }
void f(threadgroup float& a) { a = 3; }
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { float y; f(y); f(x[0]); f(t[0]); x[1] = y + t[0]; }

// --- values | rejected (certain) | MSL 4, 4.4; MLX steel/attn | A member, a local variable and a parameter by value are not in device memory.
struct S { device float x; };  // error
void f(device float* x) { device float y; }  // error
float f(device float x) { return x; }  // error

// --- setup
void take(thread float* p) { p[0] = 1; }
void set(thread float& y) { y = 1; }
float read(const thread float& y) { return y; }
float of_device(device const float* p) { return p[0]; }
template <typename T> void fill(thread T* p) { p[0] = 1; }
template <typename T> T get(const thread T& y) { return y; }
kernel void k(device float* x, device const float* o, device int* n, threadgroup float* t [[threadgroup(0)]], constant float& c) {
  float y = c;
  thread float* p = &y;

// --- arguments | rejected (certain) | MSL 1.5.2, 4, 6.5; SPIRV-Cross #2064; krafix #95; MLX, llama.cpp | What points to thread memory takes no other memory; const is not dropped, and a temporary does not bind to a reference to non-const.
  take(x);  // error
  fill(x);  // error
  set(x[0]);  // error: parameter 'y' of 'set' points to thread memory
  set(2.0f);  // error
  x[0] = read(x[1]);  // error
  x[0] = read(c);  // error
  x[0] = get(t[0]);  // error
  x[0] = of_device(&c);  // error
  x[0] = frexp(x[0], n[0]);  // error
  thread auto& r = x[0];  // error
  device float* q = o;  // error
  device float* thread* q = &p;  // error
  device auto& r = x[0];  // accepted
  take(p);  // accepted
  fill(p);  // accepted
  set(y);  // accepted
  r = read(y) + get(y) + of_device(o);  // accepted
