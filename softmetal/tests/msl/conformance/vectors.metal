// Vectors, matrices and arrays. The format of this file: ../catalogue.py

// --- too_many_elements | rejected (certain) | MSL 2.2 | A vector constructor needs as many elements as the vector has.
kernel void k(device float2* x [[buffer(0)]]) { x[0]=float2(1.0f,2.0f,3.0f); }  // error
// --- too_few_elements | rejected
kernel void k(device float4* o [[buffer(0)]]) {
  float2 a = 1;
  o[0] = float4(a, 1);  // error
}

// --- vector_to_scalar | rejected (certain) | MSL 2.2 | A vector does not convert to a scalar.
kernel void k(device float* x [[buffer(0)]]) { float2 f = 1; x[0] = f; }  // error

// --- vector_assigned | rejected (certain) | MSL 2.2; SPIRV-Cross: cannot convert between vector values | Vectors of different types do not convert implicitly.
kernel void k(device int4* x [[buffer(0)]], device uint4* y [[buffer(1)]]) {
  x[0] = y[0];  // error
  x[0] = int4(y[0]);  // accepted
}
// --- vector_product_of_int_and_uint | rejected
kernel void k(device int4* x [[buffer(0)]], uint3 g [[thread_position_in_grid]]) {
  x[0] = x[1] * g.xyyx;  // error
  x[0] = x[1] * int4(g.xyyx);  // accepted
}

// --- vector_stored_as_half | rejected (certain) | MSL 2.2 | Vectors of different types do not convert or mix implicitly.
kernel void k(device float4* x, device half4* y) {
  y[0] = x[0];  // error: half4
  y[0] = half4(x[0]);  // accepted
}
// --- vector_argument | rejected
float f(float4 v) { return v.x; }
kernel void k(device half4* h [[buffer(0)]], device float* x [[buffer(1)]]) {
  x[0] = f(h[0]);  // error
  x[0] = f(float4(h[0]));  // accepted
}
// --- vector_sum_of_float_and_half | rejected
kernel void k(device float4* o [[buffer(0)]], device half4* x [[buffer(1)]]) { o[0] = o[1] + x[0]; }  // error
kernel void k(device float4* o [[buffer(0)]], device half4* x [[buffer(1)]]) { o[0] = o[1] + float4(x[0]); }  // accepted
// --- vector_sum_of_int_and_uint | rejected
kernel void k(device uint4* x [[buffer(0)]], device int4* y [[buffer(1)]]) { x[0]=x[0]+y[0]; }  // error
kernel void k(device uint4* x [[buffer(0)]], device int4* y [[buffer(1)]]) { x[0]=x[0]+uint4(y[0]); }  // accepted
// --- vector_product_of_int_and_float | rejected
kernel void k(device float4* x [[buffer(0)]], device int4* y [[buffer(1)]]) { x[0]=x[0]*y[0]; }  // error
kernel void k(device float4* x [[buffer(0)]], device int4* y [[buffer(1)]]) { x[0]=x[0]*float4(y[0]); }  // accepted
// --- vector_product_of_int_and_scalar_float | rejected
kernel void k(device int4* x, constant float& t) { (void)(x[0] * t); }  // error
kernel void k(device int4* x, constant float& t) { (void)(x[0] * int(t)); }  // accepted
// --- vector_comparison_of_float_and_int | rejected
kernel void k(device float4* x, device int4* y) { (void)(x[0] < y[0]); }  // error
kernel void k(device float4* x, device int4* y) { (void)(x[0] < float4(y[0])); }  // accepted

// --- condition | rejected (certain) | MSL 2.2 | A vector of bool is not a condition.
kernel void k(device float4* o [[buffer(0)]]) {
  if (o[0] < o[1]) o[0] = 1;  // error
}

// --- swizzle_of_two_sets | rejected (certain) | MSL 2.2 | A swizzle cannot mix xyzw with rgba.
kernel void k(device float4* x [[buffer(0)]]) { x[0].xy=x[0].xg; }  // error

// --- swizzle_out_of_range | rejected (certain) | MSL 2.2 | A swizzle can name only elements that the vector has.
kernel void k(device float2* o [[buffer(0)]]) { o[0].z = 1; }  // error

// --- swizzle_repeated | rejected (certain) | MSL 2.2 | An assigned swizzle cannot repeat an element.
kernel void k(device float4* o [[buffer(0)]]) { o[0].xx = float2(1); }  // error

// --- swizzle_address | rejected (certain) | MSL 2.2 | A swizzle has no address.
kernel void k(device float4* x [[buffer(0)]]) { device float* p=&x[0].y; p[0]=1; }  // error
// --- swizzle_address_of_two | rejected
void f(device float2* p) { *p = 1; }
kernel void k(device float4* o [[buffer(0)]]) { f(&o[0].xy); }  // error

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
