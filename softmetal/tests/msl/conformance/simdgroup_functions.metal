// Simdgroup and quadgroup functions. The format of this file: ../catalogue.py

// --- ballot | accepted (likely) | MSL 6.9 | simd_ballot returns a simd_vote.
kernel void k(device uint* x [[buffer(0)]]) { simd_vote v = simd_ballot(x[0]>1); x[1]=uint((simd_vote::vote_t)v); x[2]=v.all(); x[3]=simd_active_threads_mask().any(); }

// --- sum_of_pointer | rejected (certain) | MSL table 6.13 | simd_sum does not take pointers.
kernel void k(device int* x [[buffer(0)]]) { x[0]=simd_sum(x)[0]; }  // error

// --- sum_of_bool | rejected (likely) | MSL table 6.13 | simd_sum does not take bool.
kernel void k(device int* x [[buffer(0)]]) {
  x[0] = simd_sum(x[1] > 2);  // error
  x[0] = simd_sum(int(x[1] > 2));  // accepted
}

// --- sum_of_long | rejected (likely) | MSL table 6.13 | Reductions do not take 64-bit integers.
kernel void k(device long* x [[buffer(0)]]) { x[0]=simd_sum(x[0]); }  // error

// --- max_of_ulong | rejected (likely) | MSL table 6.13; MLX goes through uint2 | Reductions do not take 64-bit integers.
kernel void k(device ulong* x [[buffer(0)]]) {  // rejected
  x[0] = simd_max(x[1]);  // error
kernel void k(device uint* x [[buffer(0)]]) {  // accepted
  x[0] = simd_max(x[1]);  // accepted
}

// --- and_of_float_in_braces | rejected (certain) | MSL table 6.13 | simd_and takes integers.
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {  // rejected
  x[0] = simd_and(x[1]);  // error
kernel void k(device uint* x [[buffer(0)]]) {  // accepted
  x[0] = simd_and(x[1]);  // accepted
}

// --- sum_of_bfloat | rejected (likely) | MSL tables 6.14 and 6.16 | Reductions and prefix operations do not take bfloat.
kernel void k(device bfloat* x) {
  x[0] = simd_sum(x[1]);  // error
}
// --- max_of_bfloat | rejected
kernel void k(device bfloat* x) {
  x[0] = simd_max(x[1]);  // error
}
// --- prefix_sum_of_bfloat | rejected
kernel void k(device bfloat* x) {
  x[0] = quad_prefix_inclusive_sum(x[1]);  // error
}

// --- overloads_for_bfloat | accepted (likely) | MLX, torch | A program can add overloads for bfloat.
namespace metal { bfloat simd_sum(bfloat x) { return bfloat(simd_sum(float(x))); } }
kernel void k(device bfloat* x) { x[0] = simd_sum(x[1]) + bfloat(quad_prefix_inclusive_sum(float(x[2]))); }

// --- shuffle_of_bfloat | rejected (likely) | MSL 6.9.2, table 6.14 | Shuffles do not take bfloat.
kernel void k(device bfloat* o [[buffer(0)]], ushort i [[thread_index_in_simdgroup]]) {
  o[i] = simd_shuffle(o[i], ushort(1));  // error
}
// --- shuffle_of_bfloat_vector | rejected
kernel void k(device bfloat2* o [[buffer(0)]], ushort i [[thread_index_in_simdgroup]]) {
  o[i] = simd_shuffle(o[i], ushort(1));  // error
}
// --- quad_broadcast_of_bfloat | rejected
kernel void k(device bfloat* o [[buffer(0)]], ushort i [[thread_index_in_simdgroup]]) {
  o[i] = quad_broadcast(o[i], ushort(1));  // error
}

// --- shuffle_of_long | rejected (likely) | MSL table 6.14; MLX goes through uint2 | Shuffles do not take 64-bit integers.
kernel void k(device long* x [[buffer(0)]]) {
  x[0] = simd_shuffle_down(x[1], 1);  // error
  x[0] = as_type<long>(simd_shuffle_down(as_type<uint2>(x[1]), 1));  // accepted
}

// --- shuffle_of_pointer | rejected (certain) | MSL table 6.14 | Shuffles do not take pointers.
kernel void k(device float* x [[buffer(0)]], threadgroup float* t [[threadgroup(0)]], constant float& c [[buffer(1)]]) {
  x[0] = simd_shuffle(x, 1)[0];  // error
  x[0] = simd_shuffle(x[0], 1);  // accepted
}

// --- shuffle_of_struct | rejected (certain) | MSL table 6.14 | Shuffles do not take structs.
struct S { int a; };
kernel void k(device int* x [[buffer(0)]]) { S s; s.a=1; x[0]=simd_shuffle(s,ushort(0)).a; }  // error
