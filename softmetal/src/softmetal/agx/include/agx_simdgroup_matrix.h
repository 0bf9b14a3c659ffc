// <metal_simdgroup_matrix>: the product is one instruction (mesa/4-matrix-product.patch).
#pragma once
#pragma clang system_header
#include "agx_simdgroup.h"

#include "../../msl/common/fragment.h"
#include "../../msl/common/line.h"

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

SOFTMETAL_INLINE Fragment fragment() { return fragment_of(nir_load_subgroup_invocation()); }
template <class T>
using ThreadElements = metal::vec<T, 2>;
template <class D, class A, class B, class C>
SOFTMETAL_INLINE ThreadElements<D> multiply_operation(A a, B b, C c, Line) {
  return product(factor(a), factor(b), c);
}
}  // namespace softmetal

#include "../../msl/common/simdgroup_matrix.h"

namespace metal {
SOFTMETAL_MATRIX_MEMORY(SOFTMETAL_DEVICE)
SOFTMETAL_MATRIX_MEMORY(SOFTMETAL_THREADGROUP)
#undef SOFTMETAL_MATRIX_MEMORY
}  // namespace metal
