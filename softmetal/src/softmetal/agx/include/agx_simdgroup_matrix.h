// <metal_simdgroup_matrix>: the product is one instruction (mesa/4-matrix-product.patch).
#pragma once
#pragma clang system_header
#include "agx_simdgroup.h"

extern "C" {
// The letters are the types of a, b and c: half or float.
float2 nir_simd_matrix_fmadd_agx__hhf(half2, half2, float2) AGX_CROSS_LANE;
float2 nir_simd_matrix_fmadd_agx__fhf(float2, half2, float2) AGX_CROSS_LANE;
float2 nir_simd_matrix_fmadd_agx__hff(half2, float2, float2) AGX_CROSS_LANE;
float2 nir_simd_matrix_fmadd_agx__fff(float2, float2, float2) AGX_CROSS_LANE;
half2 nir_simd_matrix_fmadd_agx__hhh(half2, half2, half2) AGX_CROSS_LANE;
}

namespace softmetal {
SOFTMETAL_INLINE float2 product(half2 a, half2 b, float2 c) {
  return nir_simd_matrix_fmadd_agx__hhf(a, b, c);
}
SOFTMETAL_INLINE float2 product(float2 a, half2 b, float2 c) {
  return nir_simd_matrix_fmadd_agx__fhf(a, b, c);
}
SOFTMETAL_INLINE float2 product(half2 a, float2 b, float2 c) {
  return nir_simd_matrix_fmadd_agx__hff(a, b, c);
}
SOFTMETAL_INLINE float2 product(float2 a, float2 b, float2 c) {
  return nir_simd_matrix_fmadd_agx__fff(a, b, c);
}
SOFTMETAL_INLINE half2 product(half2 a, half2 b, half2 c) { return nir_simd_matrix_fmadd_agx__hhh(a, b, c); }
// Other sums of half are computed in float and rounded.
template <class A, class B>
SOFTMETAL_INLINE half2 product(A a, B b, half2 c) {
  return __builtin_convertvector(product(a, b, __builtin_convertvector(c, float2)), half2);
}
// M1 and M2 cannot multiply bfloat. Kernels that do are for later GPUs, and are counted with the product of
// half.
SOFTMETAL_INLINE half2 factor(metal::vec<bfloat, 2> x) { return __builtin_bit_cast(half2, x); }
SOFTMETAL_INLINE half2 factor(half2 x) { return x; }
SOFTMETAL_INLINE float2 factor(float2 x) { return x; }

// The position of this lane's two elements, (row, column) and (row, column + 1).
struct Fragment {
  uint row, column;
};
SOFTMETAL_INLINE Fragment fragment() {
  const uint lane = nir_load_subgroup_invocation(), quad = lane / 4;
  return {(quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2};
}
}  // namespace softmetal

namespace metal {
template <class T, int Columns = 8, int Rows = Columns>
struct simdgroup_matrix {
  using storage_type = vec<T, 2>;
  storage_type elements;
  simdgroup_matrix() = default;
  SOFTMETAL_INLINE explicit simdgroup_matrix(T diagonal) {
    if (__builtin_constant_p(diagonal == (T)0) && diagonal == (T)0) {
      elements = storage_type{(T)0, (T)0};
    } else {
      const softmetal::Fragment f = softmetal::fragment();
      elements = storage_type{f.row == f.column ? diagonal : (T)0, f.row == f.column + 1 ? diagonal : (T)0};
    }
  }
  SOFTMETAL_INLINE storage_type& thread_elements() { return elements; }
  SOFTMETAL_INLINE const storage_type& thread_elements() const { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int Columns, int Rows = Columns>
SOFTMETAL_INLINE simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.elements = vec<T, 2>{value, value};
  return m;
}

template <class D, class A, class B, class C>
SOFTMETAL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                    const simdgroup_matrix<A, 8, 8>& a,
                                                    const simdgroup_matrix<B, 8, 8>& b,
                                                    const simdgroup_matrix<C, 8, 8>& c) {
  d.elements = softmetal::product(softmetal::factor(a.elements), softmetal::factor(b.elements), c.elements);
}
template <class D, class A, class B>
SOFTMETAL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                         const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>((D)0));
}

#define AGX_MATRIX_MEMORY(SPACE)                                                                        \
  template <class T, class U>                                                                           \
  SOFTMETAL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const SPACE U* source,             \
                                       ulong stride = 8, ulong2 origin = ulong2{0, 0},                  \
                                       bool transpose = false) {                                        \
    const softmetal::Fragment f = softmetal::fragment();                                                \
    const SPACE U* p = source + origin.y * stride + origin.x;                                           \
    if (transpose)                                                                                      \
      m.elements = vec<T, 2>{(T)p[f.column * stride + f.row], (T)p[(f.column + 1) * stride + f.row]};   \
    else                                                                                                \
      m.elements = vec<T, 2>{(T)p[f.row * stride + f.column], (T)p[f.row * stride + f.column + 1]};     \
  }                                                                                                     \
  template <class T, class U>                                                                           \
  SOFTMETAL_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> m, SPACE U* target, ulong stride = 8, \
                                        ulong2 origin = ulong2{0, 0}, bool transpose = false) {         \
    const softmetal::Fragment f = softmetal::fragment();                                                \
    SPACE U* p = target + origin.y * stride + origin.x;                                                 \
    p[transpose ? f.column * stride + f.row : f.row * stride + f.column] = (U)m.elements[0];            \
    p[transpose ? (f.column + 1) * stride + f.row : f.row * stride + f.column + 1] = (U)m.elements[1];  \
  }
AGX_MATRIX_MEMORY(SOFTMETAL_DEVICE)
AGX_MATRIX_MEMORY(SOFTMETAL_THREADGROUP)
#undef AGX_MATRIX_MEMORY
}  // namespace metal
