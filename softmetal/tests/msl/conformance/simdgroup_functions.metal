// Simdgroup and quadgroup functions. The format of this file: ../catalogue.py

// --- setup
struct S { int a; };
kernel void k(device float* x, device int* n, device long* l, device ulong* m, device bfloat* b, device bfloat2* c,
              ushort i [[thread_index_in_simdgroup]]) {
  S s = {1};

// --- ballot | accepted (likely) | MSL 6.9 | simd_ballot returns a simd_vote.
kernel void k(device uint* x [[buffer(0)]]) { simd_vote v = simd_ballot(x[0]>1); x[1]=uint((simd_vote::vote_t)v); x[2]=v.all(); x[3]=simd_active_threads_mask().any(); }

// --- arguments_of_reductions | rejected (certain) | MSL table 6.13 | Reductions take numbers, and simd_and integers.
  n[0] = simd_sum(n)[0];  // error
  x[0] = simd_and(x[1]);  // error

// --- bool_and_long | rejected (likely) | MSL table 6.13; MLX goes through uint2 | Reductions take neither bool nor 64-bit integers.
  n[0] = simd_sum(n[1] > 2);  // error
  l[0] = simd_sum(l[0]);  // error
  m[0] = simd_max(m[1]);  // error
  n[0] = simd_sum(int(n[1] > 2));  // accepted

// --- bfloat | rejected (likely) | MSL tables 6.14 and 6.16 | Reductions and prefix operations do not take bfloat.
  b[0] = simd_sum(b[1]);  // error
  b[0] = simd_max(b[1]);  // error
  b[0] = quad_prefix_inclusive_sum(b[1]);  // error

// --- overloads_for_bfloat | accepted (likely) | MLX, torch | A program can add overloads for bfloat.
namespace metal { bfloat simd_sum(bfloat x) { return bfloat(simd_sum(float(x))); } }
kernel void k(device bfloat* x) { x[0] = simd_sum(x[1]) + bfloat(quad_prefix_inclusive_sum(float(x[2]))); }

// --- shuffles | rejected (likely) | MSL 6.9.2, table 6.14; MLX goes through uint2 | Shuffles take neither bfloat nor 64-bit integers.
  b[i] = simd_shuffle(b[i], ushort(1));  // error
  c[i] = simd_shuffle(c[i], ushort(1));  // error
  b[i] = quad_broadcast(b[i], ushort(1));  // error
  l[0] = simd_shuffle_down(l[1], 1);  // error
  l[0] = as_type<long>(simd_shuffle_down(as_type<uint2>(l[1]), 1));  // accepted

// --- shuffles_of_others | rejected (certain) | MSL table 6.14 | Shuffles take neither pointers nor structs.
  x[0] = simd_shuffle(x, 1)[0];  // error
  n[0] = simd_shuffle(s, ushort(0)).a;  // error
