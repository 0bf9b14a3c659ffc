// Vectors, matrices and arrays. The format of this file: ../catalogue.py

// --- too_many_elements | rejected (certain) | MSL 2.2 | A vector constructor needs as many elements as the vector has.
kernel void k(device float2* x [[buffer(0)]]) { x[0]=float2(1.0f,2.0f,3.0f); }  // error
// --- too_few_elements | rejected
kernel void k(device float4* o [[buffer(0)]]) {
  float2 a = 1;
  o[0] = float4(a, 1);  // error
}

// --- constructors | accepted (certain) | MSL 2.2 | A vector constructor takes scalars and vectors of any type.
kernel void k(device float4* x [[buffer(0)]]) { x[0]=float4(x[1].xy, half(1), 3); x[2]=float4(1); x[3]=float4(int4(1,2,3,4)); uchar4 c=uchar4(x[3]); x[4]=float4(c)/255.0f; }
// --- constructors_and_swizzles | accepted
kernel void k(device float4* o [[buffer(0)]], device half4* x [[buffer(1)]]) {
  float2 a = {1, 2};
  float3 b(a, 3);
  float4 c = float4(b.zyx, 1);
  c.xy = a;
  c.zw += b.xy;
  c = c.wzyx;
  float4 d = (float4)x[0];
  half4 e = half4(c);
  float s = d[2];
  d[3] = s;
  d = 2;
  d = 1 + d * 2;
  int4 n = int4(d);
  uint4 u = uint4(n);
  vec<float, 4> v = d;
  c.rgb = b;
  o[0] = c + d * float4(u) + v + float4(e) + float4(a, a) + float4(1, b) + float4(1, a, 2);
  x[1].x = 1;
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

// --- bool_vectors | accepted (certain) | MSL 2.2 | Comparisons of vectors give vectors of bool.
kernel void k(device float4* o [[buffer(0)]]) {
  bool4 m = o[0] < o[1];
  bool4 n = m && !(o[2] == o[3]);
  bool any1 = any(n);
  bool4 z = m | n;
  float4 s = select(o[0], o[1], m);
  float4 t = m.x ? s : o[2];
  uint c = uint(m.y) + popcount(uint(z.x));
  o[0] = t + float4(n) + c + (all(m) ? 1 : 0) + any1;
}

// --- bool_swizzle | accepted (likely) | MSL 2.2 | A vector of bool has swizzles.
kernel void k(device float4* x [[buffer(0)]]) { bool4 b = x[0] > x[1]; bool2 c = b.xy; x[0].x = c.x; }

// --- bool_spelled_out | accepted (certain) | MSL 2.2 | vec<bool, N> is boolN.
kernel void k(device float* o [[buffer(0)]], device const vec<bool, 4>* x [[buffer(1)]]) {
  vec<bool, 2> w(true, false);
  vec<bool, 4> v = x[0];
  bool4 b = v;
  o[0] = (w.x ? 1 : 0) + (b.y ? 1 : 0) + select(1.0f, 2.0f, w.y);
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

// --- variable_index | accepted (certain) | MSL 2.2 | A variable can index a vector.
kernel void k(device float4* x [[buffer(0)]], uint i [[thread_index_in_simdgroup]]) { float4 v=x[0]; v[i&3]=1; x[1]=v; x[0][i&3]=2; }

// --- deduced_size | accepted (certain) | MSL 2.2 | Templates can deduce the length of a vector.
template <int N> uint f(vec<uint,N> v) { return v[N-1]; }
kernel void k(device uint* x [[buffer(0)]]) { x[0]=f(uint4(1))+f(uint2(2)); }

// --- wide_vectors | accepted (certain) | public sources | vec can have more than four elements.
kernel void k(device uint4* x [[buffer(0)]], device float* y [[buffer(1)]]) { const vec<bfloat, 8> v = as_type<vec<bfloat, 8>>(x[0]); y[0]=float(v[5]); }

// --- packed_vectors | accepted (certain) | MSL 2.2 | Packed vectors can be loaded, stored and indexed.
kernel void k(device packed_float3* p [[buffer(0)]], device packed_half4* h [[buffer(1)]]) {
  float3 a = p[0];
  p[1] = a * 2;
  p[2][1] = 3;
  half4 b = h[0];
  h[1] = b;
  h[2].x = 1;
  p[3] = packed_float3(1, 2, 3);
  a = float3(p[1]) + p[2];
  p[4] = a;
}

// --- matrices | accepted (certain) | MSL 2.3 | Matrices can be multiplied by vectors, and their columns accessed.
kernel void k(constant float4x4& m [[buffer(0)]], device float4* x [[buffer(1)]]) { x[0] = m * x[0]; float3x3 r(1.0f); x[1].xyz = r * x[1].xyz; x[2]=transpose(m)[1]; }

// --- half_matrices | accepted (certain) | MSL 2.3; llama.cpp | Metal has matrices of half.
kernel void k(device half4x4* m [[buffer(0)]], device float* x [[buffer(1)]]) { half4x4 a=m[0]; x[0]=a[1][2]; thread half4x4& r=a; r[0]=half4(1); m[0]=r; }

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
