// Scalars and their conversions. The format of this file: ../catalogue.py

// --- setup
float f(bfloat a) { return a; }
struct S { int a; };
kernel void k(device bfloat* b, device float* x, device half* h, device int* n, device uint* u, device float4* w) {

// --- bfloat_from_float | rejected (likely) | MSL 2.1 | A float does not convert to bfloat implicitly.
  b[0] = x[0];  // error

// --- bfloat_from_float_values | rejected (certain) | MSL 2.1; cubecl #1201, #1522; pytorch #177193 | A float does not convert to bfloat implicitly.
  bfloat v = 0.0f;  // error
  bfloat const v = float(x[0]);  // error
  b[0] = b[1] * 2.0f;  // error
  x[0] = f(x[1]);  // error
  bfloat const v = bfloat(x[0]);  // accepted
  b[0] = b[1] * bfloat(2.0f);  // accepted

// --- bfloat_returned_from_float | rejected (certain) | cubecl #1522 | A function cannot return a float as bfloat.
bfloat f(float a) {
  return a;  // error
  return static_cast<bfloat>(a);  // accepted
}
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) { x[0] = f(x[1]); }

// --- bfloat_from_float_in_template | rejected (likely) | cubecl #1522 | A float does not convert to bfloat implicitly in a template either.
template <typename T> void f(device T* p, float v) {
  p[0] = v;  // error
  p[0] = T(v);  // accepted
}
kernel void k(device bfloat* x [[buffer(0)]]) { f(x, 1.0f); }

// --- bfloat_from_float_in_braces | rejected (likely) | MSL 2.1 | A float in braces cannot initialise a bfloat.
struct S { bfloat a; };
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  S s = {x[0]};  // error
  S s = {bfloat(x[0])};  // accepted
  x[1] = s.a;
}

// --- bfloat_and_half | rejected (likely) | MSL 2.1; MSL 2.18 | bfloat and half do not convert to each other implicitly.
  b[0] = h[0];  // error
  b[0] = b[1] + h[0];  // error
// --- bfloat_returned_from_half | rejected (certain)
bfloat f(half h) { return h; }  // error
kernel void k(device bfloat* o [[buffer(0)]], device half* x [[buffer(1)]]) { o[0] = f(x[0]); }

// --- narrowing | rejected (certain) | C++14 [dcl.init.list] | A braced initialiser cannot narrow.
  uint y{n[0]};  // error
  S s = {u[0]};  // error
  uint y{uint(n[0])};  // accepted
  S s = {int(u[0])};  // accepted

// --- bits | rejected (certain) | MSL 2.18, 3.1 | as_type changes no size and takes no pointer; the bitwise operators take no floats.
  u[0] = as_type<uint>(w[0]);  // error
  device int* p = as_type<device int*>(x);  // error
  x[0] = x[0] & 1.0f;  // error
  u[0] = as_type<uint>(w[0].x) & 1;  // accepted

// --- as_type_struct | rejected (policy) | MSL 2.18 | as_type does not take structs.
  n[0] = as_type<int>(S{1});  // error

// --- limits | accepted (certain) | metal_limits | The library has numeric_limits and named constants.
kernel void k(device float* x [[buffer(0)]]) { x[0]=numeric_limits<float>::infinity()+numeric_limits<half>::max()+FLT_MAX-INFINITY+numeric_limits<int>::lowest(); x[1]=NAN; x[2]=isinf(x[0])||isnan(x[1])||isfinite(x[0])||signbit(x[0]); }
