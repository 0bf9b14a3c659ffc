// Function constants. The format of this file: ../catalogue.py

// --- setup
template <int N> int f() { return N; }
constant int n [[function_constant(0)]];
kernel void k(device int* x) {

// --- index_of_enumerator | accepted (certain) | MSL 5.8 | The index can be any constant expression, such as an enumerator.
enum { kIdx = 4 };
constant int base = 10;
constant uint kC [[function_constant(kIdx)]];
constant uint2 kV [[function_constant(base + 1)]];
constant half kH [[function_constant(20)]];
kernel void k(device float* o [[buffer(0)]]) { o[0] = kC + kV.x + float(kH); }
// --- index_of_namespace_enumerator | accepted
namespace n { enum E { A = 3 }; }
constant bool f [[function_constant(n::A)]];
kernel void k(device int* x [[buffer(0)]]) { x[0]=f; }

// --- index_above_65535 | rejected (certain) | MSL 5.8 | The index is at most 65535.
constant int n [[function_constant(65536)]];  // error
constant int n [[function_constant(65535)]];  // accepted
kernel void k(device int* x [[buffer(0)]]) { x[0] = n; }

// --- index_twice_as_expression | rejected (certain) | MSL 5.8 | Two function constants cannot have one index.
constant int a [[function_constant(2)]];
constant bool b [[function_constant(1 + 1)]];  // error
constant bool b [[function_constant(1 + 2)]];  // accepted
kernel void k(device int* x [[buffer(0)]]) { x[0] = a + b; }

// --- initialised | rejected (certain) | MSL 5.8 | A function constant cannot have an initialiser.
constant int n [[function_constant(0)]] = 3;  // error
kernel void k(device int* x [[buffer(0)]]) { x[0] = n; }  // rejected
constant int n [[function_constant(0)]];  // accepted
constant int m = is_function_constant_defined(n) ? n : 3;  // accepted
kernel void k(device int* x [[buffer(0)]]) { x[0] = m; }  // accepted

// --- uses | rejected (certain) | MSL 5.8 | A function constant is read-only, and is not a constant expression.
  n = 2;  // error
  int a[n];  // error
  x[0] = f<n>();  // error
  static_assert(n > 0, "n");  // error
  x[0] = n + f<2>();  // accepted

// --- types | rejected (certain) | MSL 5.8 | A function constant must be a scalar or a vector.
struct S { int a; };
constant S s [[function_constant(2)]];  // error
constant int a[2] [[function_constant(0)]];  // error
constant int4 v [[function_constant(0)]];  // accepted

// --- gate_not_bool | rejected (likely) | MSL 5.8.1 | The gate of an argument must be a bool.
constant int g [[function_constant(0)]];
kernel void k(device int* x [[buffer(0)]], device int* y [[buffer(1), function_constant(g)]]) { x[0]=1; }  // error

// --- gate_without_function_constant | rejected (policy) | MSL 5.8.1 | The gate of an argument must depend on a function constant.
constant bool g = true;
kernel void k(device int* x [[buffer(0)]], device int* y [[buffer(1), function_constant(g)]]) { x[0]=1; }  // error
