// <metal_simdgroup_matrix>: 8x8 matrices held by 32 lanes, two elements each.
//
// The includer defines fragment(), the type ThreadElements of a lane's two elements, and multiply_operation.
#pragma once
#include "fragment.h"
#include "line.h"

namespace metal {
template <class T, int Columns = 8, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  static_assert(is_floating_point_v<T>, "simdgroup_matrix holds half, bfloat or float");
  using storage_type = softmetal::ThreadElements<T>;
  storage_type elements;

  simdgroup_matrix() = default;
  // A diagonal matrix.
  SOFTMETAL_INLINE explicit simdgroup_matrix(T diagonal) {
    const softmetal::Fragment f = softmetal::fragment();
    elements = storage_type{f.row == f.column ? diagonal : (T)0, f.row == f.column + 1 ? diagonal : (T)0};
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
  m.elements = softmetal::ThreadElements<T>{value, value};
  return m;
}

template <class D, class A, class B, class C>
SOFTMETAL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                    const simdgroup_matrix<A, 8, 8>& a,
                                                    const simdgroup_matrix<B, 8, 8>& b,
                                                    const simdgroup_matrix<C, 8, 8>& c, SOFTMETAL_LINE) {
  d.elements = softmetal::multiply_operation<D>(a.elements, b.elements, c.elements, line);
}
template <class D, class A, class B>
SOFTMETAL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                         const simdgroup_matrix<B, 8, 8>& b, SOFTMETAL_LINE) {
  d.elements = softmetal::multiply_operation<D>(a.elements, b.elements, softmetal::ThreadElements<D>{}, line);
}
template <class T>
SOFTMETAL_INLINE simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a,
                                                     const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> product;
  simdgroup_multiply(product, a, b);
  return product;
}

// simdgroup_load and simdgroup_store for an address space.
#define SOFTMETAL_MATRIX_MEMORY(SPACE)                                                                     \
  template <class T, class U>                                                                              \
  SOFTMETAL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const SPACE U* source,                \
                                       ulong stride = 8, ulong2 origin = ulong2{0, 0},                     \
                                       bool transpose = false)                                             \
      __attribute__((diagnose_if(!is_same_v<T, U>,                                                         \
                                 "simdgroup_load needs memory of the matrix's element type", "error"))) {  \
    const softmetal::Fragment f = softmetal::fragment();                                                   \
    const SPACE U* p = source + origin.y * stride + origin.x;                                              \
    if (transpose)                                                                                         \
      m.elements = softmetal::ThreadElements<T>{(T)p[f.column * stride + f.row],                           \
                                                (T)p[(f.column + 1) * stride + f.row]};                    \
    else                                                                                                   \
      m.elements = softmetal::ThreadElements<T>{(T)p[f.row * stride + f.column],                           \
                                                (T)p[f.row * stride + f.column + 1]};                      \
  }                                                                                                        \
  template <class T, class U>                                                                              \
  SOFTMETAL_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> m, SPACE U* target, ulong stride = 8,    \
                                        ulong2 origin = ulong2{0, 0}, bool transpose = false)              \
      __attribute__((diagnose_if(!is_same_v<T, U>,                                                         \
                                 "simdgroup_store needs memory of the matrix's element type", "error"))) { \
    const softmetal::Fragment f = softmetal::fragment();                                                   \
    SPACE U* p = target + origin.y * stride + origin.x;                                                    \
    p[transpose ? f.column * stride + f.row : f.row * stride + f.column] = (U)m.elements[0];               \
    p[transpose ? (f.column + 1) * stride + f.row : f.row * stride + f.column + 1] = (U)m.elements[1];     \
  }
}  // namespace metal
