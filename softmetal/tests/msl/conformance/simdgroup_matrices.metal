// Simdgroup matrices. The format of this file: ../catalogue.py

// --- setup
#include <metal_simdgroup_matrix>
struct Bound { thread float& x; };
void f(thread float& x) { x = 1; }
float g(thread const float& x) { return x; }
kernel void k(device float* x, device half* h, const device float* c) {
  simdgroup_float8x8 m(1.0f);
  const simdgroup_float8x8 fixed = m;
  float t[64] = {};

// --- mixed_half_float_bfloat | accepted (certain) | MSL 6.7 | The element types of the three matrices are independent.
kernel void k(device half* h [[buffer(0)]], device float* x [[buffer(1)]], device bfloat* y [[buffer(2)]]) {
  simdgroup_half8x8 d(0.0h); simdgroup_float8x8 a; simdgroup_bfloat8x8 b; simdgroup_load(a,x); simdgroup_load(b,y);
  simdgroup_multiply_accumulate(d,a,b,d); simdgroup_store(d,h); }

// --- operator_times | accepted (likely) | MSL table 6.10 | operator* multiplies two matrices.
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 a,b; simdgroup_load(a,x); simdgroup_load(b,x); simdgroup_float8x8 c = a*b; simdgroup_store(c,x); }

// --- times_scalar | rejected (likely) | MSL table 6.10 | A simdgroup matrix cannot be multiplied by a scalar.
  m = m * 2.0f;  // error

// --- conversion | rejected (policy) | MSL 2.3.2 | A simdgroup matrix does not convert to another element type.
  simdgroup_half8x8 n = m;  // error

// --- types_and_memory | rejected (certain) | MSL 2.3.2; MSL 6.7; llama.cpp, MLX steel | A matrix has 8x8 floating elements, and memory of the same type that is not thread's.
  simdgroup_matrix<int, 8, 8> n;  // error
  simdgroup_matrix<float, 16, 16> n;  // error
  simdgroup_load(m, t, 8);  // error
  simdgroup_load(m, h, 8);  // error: element type
  simdgroup_store(m, c, 8);  // error
  simdgroup_load(m, c, 8);  // accepted

// --- in_device_memory | rejected (likely) | MSL 2.3.2 | A simdgroup matrix must be in thread memory.
kernel void k(device simdgroup_float8x8* m [[buffer(0)]], device float* x [[buffer(1)]]) { x[0]=m[0].thread_elements()[0]; }  // error
// --- in_threadgroup_memory | rejected
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup simdgroup_float8x8 m;  // error
  x[0] = 1;  // rejected
  simdgroup_float8x8 m;  // accepted
  simdgroup_load(m, x);  // accepted
  simdgroup_store(m, x);  // accepted
}

// --- elements_as_pair | rejected (certain) | Apple's header: vec<T, 64> | thread_elements() is not a float2.
  float2 v = m.thread_elements();  // error
  m.thread_elements() = float2(2);  // error
  thread float2& v = m.thread_elements();  // error
  thread float2& v = reinterpret_cast<thread float2&>(m.thread_elements());  // accepted

// --- element_reference | rejected (likely) | clang: references do not bind to vector elements | No pointer, and no reference that can write, binds to an element of a matrix.
  thread float& e = m.thread_elements()[0];  // error
  thread float& e = x[0] > 0 ? m.thread_elements()[0] : m.thread_elements()[1];  // error
  thread float* e = &m.thread_elements()[1];  // error
  thread const float* e = &fixed.thread_elements()[1];  // error
  f(m.thread_elements()[0]);  // error
  Bound b{m.thread_elements()[0]};  // error
  x[1] = modf(x[0], m.thread_elements()[0]);  // error
  float e = x[0] > 0 ? m.thread_elements()[0] : fixed.thread_elements()[1];  // accepted
// --- element_outlived | rejected | clang: reference binds to a temporary | A const reference to an element refers to a copy, which no member and no caller can keep.
  struct Kept { thread const float& e; Kept(const thread simdgroup_float8x8& m) : e(m.thread_elements()[0]) {} };  // error
  struct At { static thread const float& first(const thread simdgroup_float8x8& m) { return m.thread_elements()[0]; } };  // error
  thread const float& e = fixed.thread_elements()[0];  // accepted
  x[0] = e + g(m.thread_elements()[0]) + g(fixed.thread_elements()[1]);  // accepted

// --- elements_by_value | accepted (likely) | Apple's header; clang | thread_elements() is a reference to a storage_type; elements can be read by value, also from a const matrix.
float f(const simdgroup_float8x8 m) { const float x = m.thread_elements()[0]; return x + m.thread_elements()[1]; }
float g(float x) { return x; }
kernel void k(device float* o [[buffer(0)]]) {
  simdgroup_float8x8 m(1.0f);
  const simdgroup_float8x8 n = m;
  thread auto& e = m.thread_elements();
  e[0] = 2;
  m.thread_elements()[1] += 1;
  simdgroup_float8x8::storage_type s = m.thread_elements();
  o[0] = f(n) + g(n.thread_elements()[0]) + s[0];
}
