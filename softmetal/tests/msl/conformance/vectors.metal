// Vectors, matrices and arrays. The format of this file: ../catalogue.py

// --- setup
float f(float4 v) { return v.x; }
kernel void k(device float4* x, device half4* h, device int4* n, device uint4* u, device float2* t2, constant float& t,
              uint3 g [[thread_position_in_grid]]) {

// --- number_of_elements | rejected (certain) | MSL 2.2 | A vector constructor needs as many elements as the vector has.
  x[0].xy = float2(1.0f, 2.0f, 3.0f);  // error
  x[0] = float4(x[1].xy, 1);  // error

// --- vector_to_scalar | rejected (certain) | MSL 2.2 | A vector does not convert to a scalar.
  float s = x[0];  // error

// --- vectors_of_two_types | rejected (certain) | MSL 2.2; SPIRV-Cross: cannot convert between vector values | Vectors of different types do not convert or mix implicitly.
  n[0] = u[0];  // error
  h[0] = x[0];  // error: half4
  x[0].x = f(h[0]);  // error
  n[0] = n[1] * g.xyyx;  // error
  x[0] = x[1] + h[0];  // error
  u[0] = u[0] + n[0];  // error
  x[0] = x[0] * n[0];  // error
  (void)(n[0] * t);  // error
  (void)(x[0] < n[0]);  // error
  n[0] = int4(u[0]) * int4(g.xyyx) * int(t);  // accepted
  h[0] = half4(x[0] + float4(h[1]));  // accepted

// --- condition | rejected (certain) | MSL 2.2 | A vector of bool is not a condition.
  if (x[0] < x[1]) x[0] = 1;  // error

// --- swizzles | rejected (certain) | MSL 2.2 | A swizzle names elements of one set that the vector has; an assigned one repeats none, and none has an address.
  x[0].xy = x[0].xg;  // error
  t2[0].z = 1;  // error
  x[0].xx = float2(1);  // error
  device float* p = &x[0].y;  // error
  device float2* p = &x[0].xy;  // error
  t2[0].yx = x[0].rg;  // accepted

// --- deduced_size | accepted (certain) | MSL 2.2 | Templates can deduce the length of a vector.
template <int N> uint f(vec<uint,N> v) { return v[N-1]; }
kernel void k(device uint* x [[buffer(0)]]) { x[0]=f(uint4(1))+f(uint2(2)); }

// --- wide_vectors | accepted (certain) | public sources | vec can have more than four elements.
kernel void k(device uint4* x [[buffer(0)]], device float* y [[buffer(1)]]) { const vec<bfloat, 8> v = as_type<vec<bfloat, 8>>(x[0]); y[0]=float(v[5]); }

// --- arrays_of_vectors | accepted (certain) | MSL 1.5: C++14 | Metal has metal::array.
kernel void k(device float* o [[buffer(0)]]) {
  array<float, 4> a = {1, 2, 3, 4};
  thread auto& b = a;
  b[1] = 3;
  o[0] = a[0] + a.size();
  array<half4, 2> c;
  c[0] = 1;
  o[1] = c[0].x;
}
