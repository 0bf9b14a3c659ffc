// The generic address space of MSL 4.1. The format of this file: ../catalogue.py

// --- pointer_parameter_in_40 | rejected (certain, metal4.0) | MSL 4 | Before MSL 4.1 a pointer needs an address space.
float f(const float* p) { return p[0]; }  // error
kernel void k(device float* o [[buffer(0)]]) { o[0] = 1; }

// --- generic_parameters | accepted (likely, metal4.1) | MSL 4.1, the generic address space | In MSL 4.1 a pointer or reference without an address space is generic.
float sum(const float* p, int n) {
  float s = 0;
  for (int i = 0; i < n; i++) s += p[i];
  return s;
}
void put(float& x) { x = 1; }
struct S {
  float* p;
};
kernel void k(device float* o [[buffer(0)]]) {
  float a[2] = {1, 2};
  threadgroup float t[2];
  t[0] = 1;
  t[1] = 2;
  put(a[0]);
  put(o[1]);
  S s = {o};
  o[0] = sum(o, 2) + sum(a, 2) + sum(t, 2) + s.p[0];
}
// --- generic_assignments | accepted
struct S {
  float* p;
  int n;
};
float* pick(float* a, float* b, bool c) { return c ? a : b; }
float* first(device float* a) { return a; }
kernel void k(device float* o [[buffer(0)]]) {
  float a[2] = {1, 2};
  float* p = a;
  p = o;
  S s;
  s.p = o;
  S t = {a, 1};
  thread float* q = a;
  o[0] = *pick(p, s.p, true) + *first(o) + t.p[0] + q[1];
  const auto& r = o[1];
  o[2] = r;
}
// --- generic_templates | accepted
template <typename T>
T twice(const T& x) {
  return x * 2;
}
template <typename T>
void bump(T* x) {
  *x += 1;
}
kernel void k(device float* o [[buffer(0)]]) {
  float a = 1;
  bump(&a);
  bump(o);
  o[1] = twice(a) + twice(o[2]);
}
// --- generic_results_of_members | accepted
struct S {
  float v[4];
  float& at(int i) { return v[i]; }
  float* data() { return v; }
};
kernel void k(device float* o [[buffer(0)]]) {
  S s;
  s.at(1) = 2;
  o[0] = s.data()[1];
}

// --- kernel_buffer | rejected (likely, metal4.1) | MSL 4.1, the generic address space | In MSL 4.1 a buffer of a kernel still needs an address space.
kernel void k(float* o [[buffer(0)]]) { o[0] = 1; }  // error

// --- constant_to_generic | rejected (likely, metal4.1) | MSL 4.1, the generic address space | The generic address space does not include constant memory.
float f(const float* p) { return p[0]; }
kernel void k(device float* o [[buffer(0)]], constant float* c [[buffer(1)]]) { o[0] = f(c); }  // error

// --- generic_to_device | rejected (likely, metal4.1) | MSL 4.1, the generic address space | A generic pointer does not convert to a device pointer without a cast.
void f(float* p) {
  device float* d = p;  // error
  d[0] = 1;
}
kernel void k(device float* o [[buffer(0)]]) { f(o); }

// --- device_to_thread_parameter | rejected (certain, metal4.1) | MSL 4.1, the generic address space | In MSL 4.1 `thread` still means thread memory.
float f(thread const float* p) { return p[0]; }
kernel void k(device float* o [[buffer(0)]]) { o[1] = f(o); }  // error
// --- device_to_thread_pointer | rejected
kernel void k(device float* o [[buffer(0)]]) {
  thread float* p = o;  // error
  p[0] = 1;
}

// --- member_as_thread_reference | rejected (likely, metal4.1) | MLX PR 3963 | In MSL 4.1 data members are generic in an unqualified member function and do not bind to thread references.
struct S {
  float v[4];
  thread float& at(int i) {  // rejected
    return v[i];  // error
  thread float& at(int i) thread {  // accepted
    return v[i];  // accepted
  }
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { S s; s.at(0) = 1; x[0] = s.at(0); }
// --- member_as_thread_argument | rejected
void f(thread float& y) { y = 1; }
struct S {
  float v;
  void set() {  // rejected
    f(v);  // error
  void set() thread {  // accepted
    f(v);  // accepted
  }
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { S s; s.set(); x[0] = s.v; }

// --- thread_member_called | rejected (likely, metal4.1) | MLX PR 3963: the qualifier is viral | In MSL 4.1 an unqualified member function cannot call one qualified `thread`.
struct S {
  float v;
  void set() thread { v = 1; }
  void go() {  // rejected
    set();  // error
  void go() thread {  // accepted
    set();  // accepted
  }
};
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { S s; s.go(); x[0] = s.v; }
