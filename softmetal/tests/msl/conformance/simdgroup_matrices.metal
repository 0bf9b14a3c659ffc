// Simdgroup matrices. The format of this file: ../catalogue.py

// --- mixed_half_float_bfloat | accepted (certain) | MSL 6.7 | The element types of the three matrices are independent.
kernel void k(device half* h [[buffer(0)]], device float* x [[buffer(1)]], device bfloat* y [[buffer(2)]]) {
  simdgroup_half8x8 d(0.0h); simdgroup_float8x8 a; simdgroup_bfloat8x8 b; simdgroup_load(a,x); simdgroup_load(b,y);
  simdgroup_multiply_accumulate(d,a,b,d); simdgroup_store(d,h); }

// --- operator_times | accepted (likely) | MSL table 6.10 | operator* multiplies two matrices.
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 a,b; simdgroup_load(a,x); simdgroup_load(b,x); simdgroup_float8x8 c = a*b; simdgroup_store(c,x); }

// --- times_scalar | rejected (likely) | MSL table 6.10 | A simdgroup matrix cannot be multiplied by a scalar.
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 a; simdgroup_load(a,x); a = a * 2.0f; simdgroup_store(a,x); }  // error

// --- conversion | rejected (policy) | MSL 2.3.2 | A simdgroup matrix does not convert to another element type.
kernel void k(device half* x [[buffer(0)]], device float* y [[buffer(1)]]) { simdgroup_half8x8 a; simdgroup_load(a,x); simdgroup_float8x8 b = a; simdgroup_store(b,y); }  // error

// --- of_int | rejected (certain) | MSL 2.3.2; MSL 6.7; llama.cpp, MLX steel | The elements must be half, bfloat or float.
#include <metal_simdgroup_matrix>
kernel void k(device float* o [[buffer(0)]]) {
  simdgroup_matrix<int, 8, 8> c;  // error
  (void)c;
  o[0] = 1;
}

// --- of_other_size | rejected (certain) | MSL 2.3.2; MSL 6.7; llama.cpp, MLX steel | A simdgroup matrix must have 8 rows and 8 columns.
#include <metal_simdgroup_matrix>
kernel void k(device float* o [[buffer(0)]]) {
  simdgroup_matrix<float, 16, 16> c;  // error
  simdgroup_store(c, o, 16);
}

// --- loaded_from_thread | rejected (certain) | MSL 2.3.2; MSL 6.7; llama.cpp, MLX steel | simdgroup_load cannot read thread memory.
#include <metal_simdgroup_matrix>
kernel void k(device float* o [[buffer(0)]]) {
  float a[64];
  simdgroup_float8x8 c;
  simdgroup_load(c, a, 8);  // error
  simdgroup_store(c, o, 8);
}

// --- loaded_from_other_type_into_float | rejected (certain) | MSL 2.3.2; MSL 6.7; llama.cpp, MLX steel | simdgroup_load needs a pointer to the element type of the matrix.
#include <metal_simdgroup_matrix>
kernel void k(device half* x) {
  simdgroup_float8x8 m;  // rejected
  simdgroup_load(m, x, 8);  // error: element type
  simdgroup_half8x8 m;  // accepted
  simdgroup_load(m, x, 8);  // accepted
}

// --- stored_to_const | rejected (certain) | MSL 6.7 | simdgroup_store cannot write const memory.
kernel void k(const device float* x [[buffer(0)]]) { simdgroup_float8x8 m; simdgroup_store(m, x, 8); }  // error

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
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 a; simdgroup_load(a,x); float2 v = a.thread_elements(); x[0]=v.x+v.y; }  // error
// --- elements_as_reference_to_pair | rejected
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  simdgroup_float8x8 m(1.0f);
  thread float2& v = m.thread_elements();  // error
  thread float2& v = reinterpret_cast<thread float2&>(m.thread_elements());  // accepted
  x[0] = v.x;
}
// --- elements_assigned_pair | rejected
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 a; simdgroup_load(a,x); float2 v = a.thread_elements().xy * float2(2); a.thread_elements() = v; simdgroup_store(a,x); }  // error

// --- elements_by_auto | accepted (likely) | Apple's header | `thread auto&` binds to the elements of a matrix.
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 m(1.0f); thread auto& e = m.thread_elements(); e[0]=2; x[0]=e[1]; }

// --- storage_type | accepted (likely) | Apple's header | storage_type is the type of the elements.
kernel void k(device float* x [[buffer(0)]]) { simdgroup_float8x8 m(1.0f); simdgroup_float8x8::storage_type s = m.thread_elements(); x[0]=s[0]; }

// --- element_reference | rejected (likely) | clang: references do not bind to vector elements | No reference binds to an element of a matrix.
kernel void k(device float* o [[buffer(0)]]) { simdgroup_float8x8 m(1.0f);
  thread float& e = m.thread_elements()[0];  // error
  o[0] = e; }
// --- element_argument | rejected
void f(thread float& x) { x = 1; }
kernel void k(device float* o [[buffer(0)]]) { simdgroup_float8x8 m(1.0f);
  f(m.thread_elements()[0]);  // error
  o[0] = 1; }
// --- element_of_const | rejected
kernel void k(device float* o [[buffer(0)]]) { simdgroup_float8x8 m(1.0f); const simdgroup_float8x8 n = m;
  thread const float& e = n.thread_elements()[0];  // error
  o[0] = e; }
// --- element_address | rejected
kernel void k(device float* o [[buffer(0)]]) { simdgroup_float8x8 m(1.0f);
  thread float* p = &m.thread_elements()[1];  // error
  o[0] = *p; }

// --- elements_by_value | accepted (likely) | clang | Elements can be read by value, also from a const matrix.
float f(const simdgroup_float8x8 m) { const float x = m.thread_elements()[0]; return x + m.thread_elements()[1]; }
float g(float x) { return x; }
kernel void k(device float* o [[buffer(0)]]) {
  simdgroup_float8x8 m(1.0f);
  const simdgroup_float8x8 n = m;
  thread auto& e = m.thread_elements();
  e[0] = 2;
  m.thread_elements()[1] += 1;
  o[0] = f(n) + g(n.thread_elements()[0]);
}
