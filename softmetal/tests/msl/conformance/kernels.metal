// Kernels: arguments, host names, instantiation. The format of this file: ../catalogue.py

// --- heads | rejected (certain) | MSL 5.1 | A kernel returns void, is not a member, and is not called main.
kernel float k(device float* x) { return x[0]; }  // error: must return void
struct S { kernel void k(device int* x) { x[0] = 1; } };  // error
kernel void main(device float* x) { x[0] = 1; }  // error
kernel void k(device float* x) { return; }  // accepted

// --- calls_and_defaults | rejected (likely) | MSL 5.1 | No function can call a kernel, and a kernel cannot have default arguments.
kernel void a(device int* x [[buffer(0)]]) { x[0] = 1; }
kernel void b(device int* x [[buffer(0)]]) { a(x); }  // error
void f(device int* x) { a(x); }  // error
kernel void k(device uint* x, uint i [[thread_position_in_grid]] = 0) { x[i] = 1; }  // error
uint g(uint i = 0) { return i; }  // accepted
kernel void k(device uint* x, uint i [[thread_position_in_grid]]) { x[i] = g(); }  // accepted

// --- forward_declaration | accepted (certain) | C++ [basic.def] | A kernel can be declared before its definition.
kernel void k(device float* x [[buffer(0)]]);
template <typename T> [[kernel]] void f(device T* x [[buffer(0)]]);
kernel void k(device float* x [[buffer(0)]]) { x[0] = 1; }
template <typename T> [[kernel]] void f(device T* x [[buffer(0)]]) { x[0] = 1; }
template [[host_name("f1")]] [[kernel]] void f<int>(device int*);

// --- parameters | rejected (certain) | MSL 4, 5.1, 5.2.1 | A kernel parameter without an attribute points to device or constant memory, without further pointers.
typedef float Floats;
struct S { device float* p; };
kernel void k(device float* x, uint i) { x[i] = 1; }  // error: parameter 'i' of kernel 'k' (uint i) is neither a pointer nor a reference
kernel void k(device float* x, float4 v) { x[0] = v.x; }  // error: parameter 'v' of kernel 'k'
kernel void k(device float* x, Floats s [[buffer(1)]]) { x[0] = s; }  // error
kernel void k(float* x [[buffer(0)]]) { x[0] = 1; }  // error: needs an address space
kernel void k(thread int* x [[buffer(0)]]) { x[0] = 1; }  // error
kernel void k(device int* device* x [[buffer(0)]]) { x[0][0] = 1; }  // error
kernel void k(constant float* device* x [[buffer(0)]]) { x[0] = x[1]; }  // error
kernel void k(device S* x [[buffer(0)]], constant float4& v, uint i [[thread_position_in_grid]]) { x[i].p[0] = v.x; }  // accepted

// --- buffers_behind_aliases | accepted (certain) | MSL 5.1; MSL 5.2.1 | The type of a buffer can be an alias.
typedef device float* Floats;
using Scale = constant float&;
kernel void k(Floats o [[buffer(0)]], Scale s [[buffer(1)]], uint i [[thread_position_in_grid]]) { o[i] = s; }

// --- struct_with_pointers | accepted (certain) | MSL 5.2.1, Metal 3 | A struct in a buffer can hold device pointers.
struct Args {
  device float* a;
  constant float* b;
  uint n;
};
kernel void k(constant Args& g [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i < g.n) g.a[i] = g.b[i];
}

// --- array_reference | accepted (likely) | MSL 5.2.1 | A buffer may be a reference to an array.
kernel void k(device int* x [[buffer(0)]], constant int (&a)[4] [[buffer(1)]]) { x[0]=a[3]; }

// --- order_of_qualifiers | accepted (certain) | MSL 5.2.1 | const can precede or follow the address space.
kernel void k(device const float* a [[buffer(0)]], const device float* b [[buffer(1)]], device float* c [[buffer(2)]], const constant int& n [[buffer(3)]]) { c[0]=a[0]+b[n]; }

// --- indices | rejected (certain) | MSL 5.1, 5.2.1 | A buffer has an index from 0 to 30 of its own; [[threadgroup]] is for threadgroup pointers, and only they have it.
kernel void k(device float* x [[buffer(31)]]) { x[0] = 1; }  // error: above 30
kernel void k(device int* x [[buffer(-1)]]) { x[0] = 1; }  // error
kernel void k(device float* x [[buffer(1)]], device float* y [[buffer(1)]]) { x[0] = y[0]; }  // error: 'x' and 'y' of kernel 'k' have the same buffer index
kernel void k(threadgroup int* t [[buffer(0)]], device int* x [[buffer(1)]]) { x[0] = t[0]; }  // error
kernel void k(device uint* x [[threadgroup(0)]]) { x[0] = 1; }  // error
kernel void k(device float* x [[buffer(30)]], device float* y [[buffer(2)]], threadgroup float* t [[threadgroup(0)]]) { x[0] = y[0] + t[0]; }  // accepted
// --- buffers_32 | rejected
kernel void k(device float* x0, device float* x1, device float* x2, device float* x3, device float* x4, device float* x5, device float* x6, device float* x7, device float* x8, device float* x9, device float* x10, device float* x11, device float* x12, device float* x13, device float* x14, device float* x15, device float* x16, device float* x17, device float* x18, device float* x19, device float* x20, device float* x21, device float* x22, device float* x23, device float* x24, device float* x25, device float* x26, device float* x27, device float* x28, device float* x29, device float* x30, device float* x31) {  // error: above 30
kernel void k(device float* x0, device float* x1, device float* x2, device float* x3, device float* x4, device float* x5, device float* x6, device float* x7, device float* x8, device float* x9, device float* x10, device float* x11, device float* x12, device float* x13, device float* x14, device float* x15, device float* x16, device float* x17, device float* x18, device float* x19, device float* x20, device float* x21, device float* x22, device float* x23, device float* x24, device float* x25, device float* x26, device float* x27, device float* x28, device float* x29, device float* x30) {  // accepted
  x0[0] = 1;
}

// --- threadgroup_index_31 | rejected (likely) | MSL 5.1; MSL 5.2.1 | A threadgroup index is at most 30.
kernel void k(device float* o [[buffer(0)]], threadgroup float* t [[threadgroup(31)]]) {  // error
  t[0] = 1;
  o[0] = t[0];
}

// --- coherent_buffer | accepted (certain, metal3.2) | MSL 3.2, what is new | A buffer can be coherent(device) from MSL 3.2.
kernel void k(volatile coherent(device) device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  o[i] = 1;
}

// --- host_name_twice | rejected (likely) | MSL 5.1 | Two kernels cannot have one host name.
[[host_name("a")]] kernel void k1(device int* x [[buffer(0)]]) { x[0]=1; }
[[host_name("a")]] kernel void k2(device int* x [[buffer(0)]]) { x[0]=2; }  // error

// --- host_name_of_instances_twice | rejected (likely) | MSL 5.1 | Two instantiations cannot have one host name.
template <typename T> kernel void f(device T* x [[buffer(0)]]) { x[0] = 1; }
template [[host_name("f")]] kernel void f<float>(device float*);
template [[host_name("f")]] kernel void f<int>(device int*);  // error
template [[host_name("g")]] kernel void f<int>(device int*);  // accepted

// --- function_as_template_argument | accepted (certain) | llama.cpp kernel_mul_mm | A function can be a template argument of a kernel.
template <typename T> void dequantize(device const float* p, thread T& out) { out = p[0]; }
template <typename T, void (*read)(device const float*, thread T&)> kernel void f(device const float* x [[buffer(0)]], device T* y [[buffer(1)]]) {
  T value;
  read(x, value);
  y[0] = value;
}
typedef decltype(f<float, dequantize<float>>) f_t;
template [[host_name("f")]] kernel f_t f<float, dequantize<float>>;

// --- overload_of_no_template | rejected (certain) | C++ [temp.explicit] | An instantiation must have the parameters of one of the overloads.
template <typename T> kernel void k(device T* x [[buffer(0)]]) { x[0] = T(1); }
template <typename T> kernel void k(device T* x [[buffer(0)]], constant int& n [[buffer(1)]]) { x[0] = T(n); }
template [[host_name("a")]] kernel void k<float>(device float*, device float*);  // error

// --- overload_by_constraint | rejected (policy) | not supported by softmetal | Overloads of kernels must differ in the text of their parameters.
template <typename T, enable_if_t<sizeof(T) == 2, bool> = true> kernel void k(device T* x [[buffer(0)]]) { x[0] = 1; }
template <typename T, enable_if_t<sizeof(T) == 4, bool> = true> kernel void k(device T* x [[buffer(0)]]) { x[0] = 2; }
template [[host_name("a")]] kernel void k<half>(device half*);  // error

// --- arguments_deduced_behind_alias | rejected (policy) | not supported by softmetal | Template arguments are not deduced from types behind aliases.
template <typename T> using D = device T*;
using F = device float*;
template <typename T> kernel void k(D<T> x [[buffer(0)]]) { x[0] = 1; }
template [[host_name("a")]] kernel void k(F);  // error

// --- specialisation | rejected (policy) | not supported by softmetal | A kernel cannot have explicit specialisations.
template <typename T> kernel void k(device T* x [[buffer(0)]]) { x[0] = 1; }
template <> kernel void k<float>(device float* x [[buffer(0)]]) { x[0] = 2; }  // error
template [[host_name("a")]] kernel void k<half>(device half*);
