// Functions of the library. The format of this file: ../catalogue.py

// --- setup
kernel void k(device float* x, device half* h, device int* n, device uint* u) {

// --- arguments_of_several_types | rejected (certain) | MSL 6.4 | A call with arguments of different types is ambiguous.
  n[0] = max(n[1], u[0]);  // error
  u[0] = max(u[0], 0);  // error
  x[0] = fmax(h[0], x[0]);  // error

// --- float_and_integer | rejected (likely) | MSL 6.4 | A call with a float and an int is ambiguous.
  x[0] = max(x[1], 0);  // error
  x[0] = max(x[0], n[0]);  // error: ambiguous
  x[0] = max(x[0], float(n[0]));  // accepted

// --- exp_of_int | rejected (certain) | MSL 6.5 | A floating-point function of an integer is ambiguous.
kernel void k(device int* x [[buffer(0)]], device float* y [[buffer(1)]]) { y[0] = exp(x[0]); }  // error
// --- isnan_of_int | rejected (likely)
kernel void k(device int* x [[buffer(0)]]) { x[0]=isnan(x[0]); }  // error

// --- pow_of_float_and_int | accepted (certain) | MSL 6.5 | pow, ldexp and fmod take a float and a literal of another type.
kernel void k(device float* x [[buffer(0)]]) { x[0]=pow(x[0],2); x[1]=powr(x[0],2.5); x[2]=ldexp(x[2],3); x[3]=fmod(x[3],2); }

// --- functions_of_c | rejected (certain) | MSL 6.5 | The library lacks some functions of C.
  x[0] = log1p(x[1]);  // error: undeclared identifier 'log1p'
  x[0] = expm1(x[0]);  // error
  x[0] = hypot(x[0], x[1]);  // error
  memcpy(x, x + 4, 16);  // error
  printf("%f", x[0]);  // error
