// Conditional expressions. The format of this file: ../catalogue.py

// --- setup
struct P { float a; };
kernel void k(device float* x [[buffer(0)]], device float4* u [[buffer(1)]], device P* q [[buffer(2)]], constant int& n [[buffer(3)]]) {
  float a = 1, b = 2;
  float4 v = 1;
  P p{1};
  threadgroup float s;
  if (n == 4) s = v.y;
  x[1] = a + b + p.a;

// --- assigned | rejected (certain) | C++ [expr.cond] | A conditional expression with arms in different address spaces is a temporary and cannot be written.
  (n > 0 ? x[0] : a) = 2;  // error
  (n > 0 ? x[0] : x[1]) = 2;  // accepted
  (n > 0 ? v : u[0]).x = 2;  // error
  (n > 0 ? u[1] : u[0]).x = 2;  // accepted
  (n > 0 ? p : q[0]).a = 2;  // error
  (n > 0 ? q[1] : q[0]).a += 2;  // accepted
  (n > 0 ? a : s)++;  // error
  (n > 0 ? a : b)++;  // accepted
// --- assigned_in_template | rejected
template <typename T> void f(device T* x, int n) {
  T a = 1;  // rejected
  (n > 0 ? x[0] : a) += 2;  // error
  (n > 0 ? x[0] : x[1]) += n > 0 ? x[2] : T(3);  // accepted
}
kernel void k(device float* x [[buffer(0)]], constant int& n [[buffer(1)]]) { f(x, n); }
// --- address_taken | rejected
  thread float* r = &(n > 0 ? x[0] : a); *r = 2;  // error
  thread float* r = &(n > 0 ? b : a); *r = 2;  // accepted
  thread float& to = n > 0 ? x[0] : a; to = 2;  // error
  const thread float& to = n > 0 ? x[0] : a; b = to;  // accepted

// --- device_vector_and_temporary | accepted (certain) | C++ [expr.cond] | One arm can be a vector in memory and the other a temporary.
uint4 f() { return uint4(1); }
kernel void k(const device uint4* h [[buffer(0)]], device uint4* x [[buffer(1)]]) { x[0] = x[1].x ? *h : f(); }

// --- struct_and_temporary | rejected (unsure) | no public Metal source has it | The arms cannot be a named struct and a temporary.
struct S { float x; };
S made(float x) { return {x}; }
kernel void k(device float* o, constant bool& c) {
  S own = {1};  // rejected
  S s = c ? own : made(o[0]);  // error: a conditional operator between a named object and a temporary of type 'S'
  o[0] = s.x;  // rejected
  S own = {1}, other = made(o[0]);  // accepted
  S s = c ? own : other;  // accepted
  S t = c ? made(o[1]) : made(o[2]);  // accepted
  float4 v = c ? float4(s.x) : float4(t.x) * o[0];  // accepted
  o[0] = v.x + (c ? s.x : t.x + 1);  // accepted
}
// --- struct_element_and_temporary | rejected
template <typename T> struct S { T x; };
template <typename T> S<T> made(T x) { return {x}; }  // rejected
template <typename T> float f(bool c, T x) {
  S<T> own[2] = {{1}, {2}};  // rejected
  return (c ? made(x) : own[1]).x;  // error: a conditional operator between a named object and a temporary of type 'S<float>'
  S<T> own[2] = {{1}, {x}};  // accepted
  return (c ? own[0] : own[1]).x;  // accepted
}
kernel void k(device float* o, constant bool& c) { o[0] = f(c, o[1]); }

// --- structs_in_two_spaces | rejected (unsure) | no public Metal source has it | The arms cannot be structs in different address spaces.
struct S { float x; };
kernel void k(device S* o, constant S* t, constant bool& c) {
  S own = c ? o[0] : t[0];  // error: a conditional operator between objects of types
  o[1] = own;  // rejected
  S own = t[0];  // accepted
  if (c) own = o[0];  // accepted
  o[1] = c ? o[1] : o[2];  // accepted
}

// --- structs_of_two_types | rejected (certain) | C++ [expr.cond] | The arms cannot be structs of different types.
struct Pair { float a, b; };
struct Other { float a, b; };  // rejected
kernel void k(device Pair* p, device Other* o) { p[0] = p[1].a > 0 ? p[1] : o[1]; }  // error
kernel void k(device Pair* p, device Pair* o) { p[0] = p[1].a > 0 ? p[1] : o[1]; }  // accepted
