// Attributes of kernel inputs and functions, and unknown attributes. The format of this file: ../catalogue.py

// --- types_of_positions | rejected (certain) | MSL 5.2.3, 5.2.3.6 | A position is ushort or uint, or a vector of up to three; the indices are scalars.
kernel void k(device float* x, int i [[thread_position_in_grid]]) { x[i] = 1; }  // error: must be uint or ushort
kernel void k(device int* x, int3 i [[thread_position_in_grid]]) { x[i.x] = 1; }  // error
kernel void k(device float* x, float i [[thread_position_in_grid]]) { x[0] = i; }  // error
kernel void k(device uint* x, ulong i [[thread_position_in_grid]]) { x[i] = 1; }  // error
kernel void k(device float* x, uint4 i [[thread_position_in_grid]]) { x[0] = i.x; }  // error
kernel void k(device float* x, uint2 i [[thread_index_in_simdgroup]]) { x[i.x] = 1; }  // error
kernel void k(device int* x, uint3 i [[thread_index_in_threadgroup]]) { x[i.x] = 1; }  // error
kernel void k(device float* x, ushort2 i [[thread_position_in_grid]]) { x[i.x] = 1; }  // accepted
// --- position_pointer | rejected (likely)
kernel void k(device float* o [[buffer(0)]], device uint* i [[thread_position_in_grid]]) { o[0] = i[0]; }  // error

// --- mixed_scalar_and_vector | rejected (certain) | MSL 5.2.3; triton-msl #10 | The positions and sizes of a kernel must be all scalars, or all vectors of the same length.
kernel void k(device uint* x [[buffer(0)]],
    uint p [[threadgroup_position_in_grid]],  // rejected
    uint3 l [[thread_position_in_threadgroup]]) {  // error
  x[p] = l.x;  // rejected
    uint3 p [[threadgroup_position_in_grid]],  // accepted
    uint3 l [[thread_position_in_threadgroup]]) {  // accepted
  x[p.x] = l.x;  // accepted
}
// --- mixed_position_and_size | rejected
kernel void k(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]],
              uint3 n [[threads_per_threadgroup]]) {  // error
  o[i] = n.x;
}
// --- mixed_numbers_of_elements | rejected
kernel void k(device uint* x [[buffer(0)]], uint2 p [[thread_position_in_grid]],
    ushort3 n [[threads_per_grid]]) {  // error
  x[p.x] = n.x;  // rejected
    ushort2 n [[threads_per_grid]], uint lane [[thread_index_in_simdgroup]]) {  // accepted
  x[p.x] = n.x + lane;  // accepted
}
// --- mixed_in_template | rejected
template <typename T> kernel void f(device uint* x [[buffer(0)]], T p [[thread_position_in_grid]],
    uint n [[threads_per_grid]]) {  // error
    uint n [[threads_per_grid]]) {  // accepted
  x[0] = n;
}
template [[host_name("f")]] kernel void f<uint2>(device uint*, uint2, uint);  // rejected
template [[host_name("f")]] kernel void f<uint>(device uint*, uint, uint);  // accepted
// --- mixed_behind_alias | rejected
using position = uint3;  // rejected
using position = uint;  // accepted
kernel void k(device uint* x [[buffer(0)]], position p [[thread_position_in_grid]],
    uint n [[threads_per_grid]]) {  // error
  x[p.x] = n;  // rejected
    uint n [[threads_per_grid]]) {  // accepted
  x[p] = n;  // accepted
}

// --- attribute_twice | rejected (policy) | MSL 5.2.3 | Two parameters cannot have one attribute.
kernel void k(device int* x [[buffer(0)]], uint i [[thread_position_in_grid]], uint j [[thread_position_in_grid]]) { x[i]=j; }  // error

// --- inputs | rejected (certain) | MSL 5.2.3; m1-gpu-cpp #4 | thread_execution_width and threads_per_simdgroup are the same input; [[position]] is not one of a kernel.
kernel void k(device uint* x, uint a [[threads_per_simdgroup]], uint b [[thread_execution_width]]) { x[a] = b; }  // error
kernel void k(device int* x, float4 p [[position]]) { x[0] = p.x; }  // error
kernel void k(device uint* x, uint a [[threads_per_simdgroup]], uint b [[simdgroups_per_threadgroup]]) { x[a] = b; }  // accepted

// --- attributes_of_function_parameters | accepted (likely) | get_coord in torch | Attributes of kernel inputs have no effect on parameters of other functions.
uint f(uint lane [[thread_index_in_simdgroup]]) { return lane; }
kernel void k(device uint* x [[buffer(0)]], uint i [[thread_index_in_simdgroup]]) { x[i] = f(i); }

// --- program_scope_input_type | rejected (certain) | MSL 5.2.3.6 | An input at program scope must have a type that the attribute allows.
int2 place [[thread_position_in_grid]];  // error
kernel void k(device float* o [[buffer(0)]]) { o[0] = place.x; }

// --- program_scope_input_written | rejected (likely) | MSL 5.2.3.6 | An input at program scope is read-only.
uint tid [[thread_position_in_grid]];  // rejected
const uint tid [[thread_position_in_grid]];  // accepted
namespace n { ushort lane [[thread_index_in_simdgroup]]; uint f(uint a = tid) { return a + lane; } }  // accepted
struct S { uint tid; uint get() const thread { return tid; } };  // accepted
struct A { uint q; A(uint t) : q(t + tid) {} };  // accepted
kernel void k(device uint* o) {
  tid = 3;  // error
  o[0] = tid;  // rejected
  S s{3};  // accepted
  { uint tid = 4; o[tid] = s.get() + s.tid; }  // accepted
  o[1] = tid + ::n::lane + n::f() + A(1).q;  // accepted
}

// --- max_threads_after_parameters | rejected (certain) | C++ [dcl.attr.grammar] | An attribute after the parameter list applies to the type, so function attributes are not allowed there.
kernel void k(device uint* x [[buffer(0)]]) [[max_total_threads_per_threadgroup(32)]] { x[0]=1; }  // error
// --- noinline_after_parameters | rejected
float f(float x) [[noinline]] { return x; }  // error
kernel void k(device float* o [[buffer(0)]]) { o[0] = f(1); }

// --- max_threads_of_function_constant | rejected (certain) | MSL 5.2.3 | max_total_threads_per_threadgroup needs a constant expression.
constant int n [[function_constant(0)]];
[[kernel, max_total_threads_per_threadgroup(n)]] void k(device int* x [[buffer(0)]]) { x[0]=1; }  // error

// --- unknown_attributes | accepted (likely) | C++ [dcl.attr.grammar] | Unknown attributes are ignored with a warning, in every position.
[[vendor::hot]] float f(float x [[foo]], float y [[maybe_unused]]) [[bar]] { return x; }
struct S { float x [[foo]]; };
kernel void k(device S* o [[buffer(0), foo]], constant float& c [[foo]] [[buffer(1)]],
              uint i [[thread_position_in_grid]] [[foo, bar(2)]]) [[foo]] {
  [[foo]] float y = f(c, 1) * 2;
  o[i].x = y;
}

// --- pragmas | accepted (likely) | MSL 1.5: C++14 | The pragmas and attributes of shipped kernels are accepted.
#pragma METAL internals : enable
#pragma clang diagnostic ignored "-Wunused"
inline __attribute__((always_inline)) float f(float x) { return x; }
[[gnu::always_inline]] static inline float g(float x) { return x; }
__attribute__((noinline)) float h(float x) { return x; }
METAL_FUNC float q(float x) { return x; }
kernel void k(device float* __restrict__ o [[buffer(0)]], volatile device uint* v [[buffer(1)]],
              device const float* restrict_ [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  [[maybe_unused]] int n = 1;
  _Pragma("clang loop unroll(full)") for (int j = 0; j < 4; j++) o[j] = f(g(h(q(j))));
#pragma unroll
  for (int j = 0; j < 4; j++) o[j] += restrict_[j];
#pragma clang loop unroll_count(2)
  for (int j = 0; j < 4; j++) v[j] = 1;
#pragma unroll(4)
  for (int j = 0; j < 4; j++) o[j] += 1;
  switch (i) {
    case 1:
      o[0] = 1;
      [[fallthrough]];
    default:
      break;
  }
}

// --- pragmas_in_macros | accepted (certain) | public sources | _Pragma works in macros.
#define U _Pragma("clang loop unroll(full)")
kernel void k(device int* x [[buffer(0)]]) { U for (int i=0;i<4;i++) x[i]=1; _Pragma("unroll") for (int i=0;i<4;i++) x[i]=2; }
