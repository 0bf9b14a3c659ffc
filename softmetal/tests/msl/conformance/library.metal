// Functions of the library. The format of this file: ../catalogue.py

// --- max_of_int_and_uint | rejected (certain) | MSL 6.4 | A call with arguments of different types is ambiguous.
kernel void k(device int* n [[buffer(0)]], device uint* u [[buffer(1)]]) { n[0] = max(n[1], u[0]); }  // error
// --- max_of_uint_and_literal | rejected
kernel void k(device uint* x [[buffer(0)]]) { x[0] = max(x[0], 0); }  // error
// --- fmax_of_half_and_float | rejected
kernel void k(device half* x [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = fmax(x[0], y[0]); }  // error

// --- max_of_float_and_literal | rejected (likely) | MSL 6.4 | A call with a float and an int is ambiguous.
kernel void k(device float* n [[buffer(0)]]) { n[0] = max(n[1], 0); }  // error
// --- max_of_float_and_int | rejected
kernel void k(device float* x, constant int& n) {
  x[0] = max(x[0], n);  // error: ambiguous
  x[0] = max(x[0], float(n));  // accepted
}

// --- exp_of_int | rejected (certain) | MSL 6.5 | A floating-point function of an integer is ambiguous.
kernel void k(device int* x [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = exp(x[0]); }  // error
// --- isnan_of_int | rejected (likely)
kernel void k(device int* x [[buffer(0)]]) { x[0]=isnan(x[0]); }  // error

// --- pow_of_float_and_int | accepted (certain) | MSL 6.5 | pow, ldexp and fmod take a float and a literal of another type.
kernel void k(device float* x [[buffer(0)]]) { x[0]=pow(x[0],2); x[1]=powr(x[0],2.5); x[2]=ldexp(x[2],3); x[3]=fmod(x[3],2); }

// --- log1p | rejected (certain) | MSL 6.5 | The library lacks some functions of C: log1p, expm1, hypot, memcpy.
kernel void k(device float* x) {
  x[0] = log1p(x[1]);  // error: undeclared identifier 'log1p'
  x[0] = log(1 + x[1]);  // accepted
}
// --- expm1 | rejected
kernel void k(device float* x [[buffer(0)]]) { x[0]=expm1(x[0]); }  // error
// --- hypot | rejected
kernel void k(device float* x [[buffer(0)]]) { x[0]=hypot(x[0],x[1]); }  // error
// --- memcpy | rejected
kernel void k(device float* x [[buffer(0)]]) { memcpy(x, x+4, 16); }  // error

// --- calls_of_shipped_kernels | accepted (certain) | MSL 6 | The library functions accept the calls of shipped kernels.
kernel void k(device float* o [[buffer(0)]], device half4* h [[buffer(1)]], device int* n [[buffer(2)]]) {
  float x = o[0], c;
  float s = sincos(x, c);
  int e;
  float fr = frexp(x, e);
  o[0] = clamp(x, 0.0f, 1.0f) + mix(x, 2.0f, 0.5f) + step(0.0f, x) + sign(x) + fract(x) + rsqrt(x) +
         saturate(x) + fma(x, x, x) + exp2(x) + powr(x, 2.0f) + ldexp(x, 2) + atan2(x, x) + round(x) +
         copysign(x, -1.0f) + s + c + fr + e;
  h[0] = max(h[1], 0.0h) + exp(h[2]) * dot(h[1], h[2]) + clamp(h[0], 0.0h, 1.0h) + normalize(h[1]) +
         fmax(h[0], h[1]);
  n[0] = min(n[1], 3) + abs(n[2]) + clz(n[3]) + ctz(n[4]) + popcount(n[5]) + mulhi(n[1], n[2]) +
         rotate(n[1], 3) + extract_bits(uint(n[2]), 2, 3) + reverse_bits(n[1]) + max3(n[0], n[1], n[2]) +
         madsat(n[0], n[1], n[2]) + isnan(x) + isinf(x) + signbit(x);
}

// --- integer_functions | accepted (certain) | MSL 6.4 | The library has the integer functions of the specification.
kernel void k(device uint* x [[buffer(0)]]) { x[0]=popcount(x[1])+clz(x[1])+ctz(x[1])+mulhi(x[0],x[1])+extract_bits(x[2],3,4)+insert_bits(x[0],x[1],1,2)+absdiff(x[0],x[1])+hadd(x[0],x[1])+rotate(x[0],5u)+mad24(x[0],x[1],x[2])+reverse_bits(x[3])+addsat(x[0],x[1]); }
