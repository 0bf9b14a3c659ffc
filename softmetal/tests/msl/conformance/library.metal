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
