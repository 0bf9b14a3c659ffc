// Scalars and their conversions. The format of this file: ../catalogue.py

// --- bfloat_from_float | rejected (likely) | MSL 2.1 | A float does not convert to bfloat implicitly.
kernel void k(device bfloat* x [[buffer(0)]], device float* y [[buffer(1)]]) { x[0] = y[0]; }  // error
// --- bfloat_from_float_argument | rejected (certain)
float f(bfloat a) { return a; }
kernel void k(device float* x [[buffer(0)]]) { x[0]=f(x[1]); }  // error

// --- bfloat_from_literal | rejected (certain) | MSL 2.1; cubecl #1201, pytorch #177193 | A float literal does not convert to bfloat implicitly.
kernel void k(device bfloat* x [[buffer(0)]]) { bfloat b = 0.0f; x[0]=b; }  // error

// --- bfloat_const_from_float | rejected (certain) | cubecl #1522 | A float cannot initialise a const bfloat.
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  bfloat const v = float(x[0]);  // error
  bfloat const v = bfloat(x[0]);  // accepted
  x[1] = v;
}

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

// --- bfloat_times_float | rejected (certain) | MSL 2.1; cubecl #1201 | The product of a bfloat and a float is a float.
kernel void k(device bfloat* x [[buffer(0)]]) {
  x[0] = x[1] * 2.0f;  // error
  x[0] = x[1] * bfloat(2.0f);  // accepted
}

// --- bfloat_from_half | rejected (likely) | MSL 2.1; MSL 2.18 | A half does not convert to bfloat implicitly.
kernel void k(device bfloat* x [[buffer(0)]], device half* y [[buffer(1)]]) { x[0] = y[0]; }  // error
// --- bfloat_returned_from_half | rejected (certain)
bfloat f(half h) { return h; }  // error
kernel void k(device bfloat* o [[buffer(0)]], device half* x [[buffer(1)]]) { o[0] = f(x[0]); }

// --- bfloat_plus_half | rejected (likely) | MSL 2.1; MSL 2.18 | bfloat and half have no common type.
kernel void k(device bfloat* o [[buffer(0)]], device half* h [[buffer(1)]]) { o[0] = o[1] + h[0]; }  // error

// --- bfloat_conversions | accepted (certain) | MSL 2.1; MSL 2.18 | Casts convert any scalar to bfloat.
kernel void k(device bfloat* o [[buffer(0)]], device float* x [[buffer(1)]], device half* h [[buffer(2)]]) {
  o[0] = bfloat(x[0]);
  o[1] = static_cast<bfloat>(h[0]);
  o[2] = (bfloat)x[1];
  float f = o[3];
  o[4] = bfloat(f + o[1]);
  bfloat4 v = bfloat4(float4(1));
  float4 w = float4(v);
  o[5] = v.x;
  x[0] = w.x + f;
  h[1] = half(o[6]);
  bfloat s = 1.0bf;
  s += o[1];
  o[7] = s * o[2];
}

// --- bfloat_operators | accepted (certain) | MSL 2.1 | The operators take two bfloats, or a bfloat and an integer.
kernel void k(device bfloat* x [[buffer(0)]], device float* y [[buffer(1)]]) {
  bfloat a = x[0] * x[1] + x[2];
  a += x[3];
  x[4] = a > x[5] ? a : x[5];
  y[0] = a + 1.0f;
}

// --- bfloat_vectors | accepted (certain) | MSL 2.1 | Metal has vectors of bfloat.
kernel void k(device bfloat4* x [[buffer(0)]]) { bfloat4 v=x[0]; float4 f=float4(v); x[1]=bfloat4(f*2.0f); bfloat s=v.x; x[0].y=s; }

// --- bfloat_to_float | accepted (certain) | MSL 2.1; llama.cpp, MLX | A bfloat converts to float implicitly.
kernel void k(device bfloat* x [[buffer(0)]], device float* y [[buffer(1)]]) { y[0]=x[0]; y[1]=float(x[1])*2; x[2]=bfloat(y[1]); x[3]=static_cast<bfloat>(y[0]); }

// --- half_and_float | accepted (certain) | MSL 2.1; MSL 2.18 | half and float convert to each other implicitly.
kernel void k(device half* o [[buffer(0)]], device float* x [[buffer(1)]]) {
  o[0] = x[0];
  x[1] = o[1] * 2.0;
  half h = x[2] + o[2];
  h *= x[3];
  h += 1;
  o[3] = h;
  o[4] = 1;
  o[5] = x[4] > 0 ? h : 0.0h;
  int n = o[1];
  o[6] = n;
}

// --- half_literals | accepted (certain) | MSL 2.1 | The suffix h makes a half literal.
kernel void k(device half* x [[buffer(0)]]) { x[0]=0.5h+max(x[1],0.0h)+HALF_MAX; x[1]=x[0]*2; x[2]=x[1]*2.0f; }

// --- literal_suffixes | accepted (certain) | MSL 2.1; MSL 2.18 | Literals can have the suffixes h, f, bf, u, l and ul.
kernel void k(device float* o [[buffer(0)]]) {
  half h = 1.0h;
  half g = 2.H;
  float f = 1.5f;
  bfloat b = 1.0bf;
  uint u = 3u;
  long l = 4l;
  ulong m = 5ul;
  o[0] = 0x1.8p3 + h + g + f + float(b) + u + l + m + 1e-3 + .5 + 0b101 + 'a';
}

// --- narrowing_to_uint | rejected (certain) | C++14 [dcl.init.list] | A braced initialiser cannot narrow.
kernel void k(device int* x [[buffer(0)]]) {
  uint y{x[0]};  // error
  uint y{uint(x[0])};  // accepted
  x[1] = y;
}
// --- narrowing_to_member | rejected
struct S { int a; };
kernel void k(device uint* x [[buffer(0)]]) {
  S s = {x[0]};  // error
  S s = {int(x[0])};  // accepted
  x[1] = s.a;
}

// --- as_type_sizes | rejected (certain) | MSL 2.18 | as_type cannot change the size.
kernel void k(device float4* x [[buffer(0)]], device uint2* y [[buffer(1)]]) {
  y[0] = as_type<uint2>(x[0]);  // error
  y[0] = as_type<uint2>(x[0].xy);  // accepted
}

// --- as_type_pointer | rejected (certain) | MSL 2.18 | as_type does not take pointers.
kernel void k(device float* x [[buffer(0)]]) { device int* p = as_type<device int*>(x); p[0]=1; }  // error

// --- as_type_struct | rejected (policy) | MSL 2.18 | as_type does not take structs.
struct S { int a; };
kernel void k(device int* x [[buffer(0)]]) { S s; s.a=1; x[0]=as_type<int>(s); }  // error

// --- as_type_forms | accepted (certain) | MSL 2.18 | as_type converts between scalars and vectors of the same size.
kernel void k(device uint* o [[buffer(0)]], device float4* x [[buffer(1)]]) {
  o[0] = as_type<uint>(x[0].x);
  half2 h = as_type<half2>(o[1]);
  o[2] = as_type<uint>(h);
  uint4 u = as_type<uint4>(x[1]);
  o[3] = u.x + as_type<ushort>(h.x) + as_type<uint2>(ulong(3)).y;
  char4 c = as_type<char4>(o[4]);
  o[5] = c.x;
}

// --- float_bits | rejected (certain) | MSL 3.1 | The bitwise operators do not take floats.
kernel void k(device float* x [[buffer(0)]]) { x[0]=x[0]&1.0f; }  // error

// --- long_arithmetic | accepted (certain) | MSL 2.1 | There are 64-bit integers, with arithmetic and the usual names.
kernel void k(device long* x [[buffer(0)]], device ulong* y [[buffer(1)]]) { x[0]=x[1]/3+long(y[0]%7ul)+size_t(4)+ptrdiff_t(1); int64_t a=x[2]; uint64_t b=y[1]>>33; y[2]=b*a; }

// --- limits | accepted (certain) | metal_limits | The library has numeric_limits and named constants.
kernel void k(device float* x [[buffer(0)]]) { x[0]=numeric_limits<float>::infinity()+numeric_limits<half>::max()+FLT_MAX-INFINITY+numeric_limits<int>::lowest(); x[1]=NAN; x[2]=isinf(x[0])||isnan(x[1])||isfinite(x[0])||signbit(x[0]); }

// --- layouts | accepted (certain) | MSL 2.2 | Types have the sizes and alignments of the specification.
static_assert(sizeof(float3) == 16 && sizeof(packed_float3) == 12 && alignof(half4) == 8 &&
                  sizeof(bool4) == 4 && sizeof(long) == 8 && sizeof(char) == 1 && sizeof(size_t) == 8 &&
                  sizeof(ptrdiff_t) == 8 && alignof(packed_half4) == 2,
              "layout");
static_assert(is_same<size_t, ulong>::value || sizeof(size_t) == 8, "size_t");
kernel void k(device float* o [[buffer(0)]]) {
  o[0] = INFINITY + FLT_MAX + M_PI_F + HALF_MAX + numeric_limits<half>::max() + NAN + INT_MAX + UINT_MAX +
         MAXFLOAT;
}
