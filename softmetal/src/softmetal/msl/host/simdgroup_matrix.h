// <metal_simdgroup_matrix>: 8x8 matrices held by 32 lanes, two elements each.
#pragma once
#pragma clang system_header
#include "simdgroup.h"

namespace softmetal {
// The position of this lane's two elements, (row, column) and (row, column + 1), as on Apple's GPUs up to
// Metal 3.
struct Fragment {
  int row, column;
};
SOFTMETAL_INLINE Fragment fragment() {
  const int lane = softmetal_current_lane()->lane, quad = lane / 4;
  return {(quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2};
}

// d = a * b + c in float, as a sequence of fused multiply-adds (the GPU's order of summation is not
// published). The result is rounded once to the element type of d, when a lane takes its elements.
SOFTMETAL_UNCHECKED inline void multiply(softmetal_simdgroup* group) {
  ++softmetal_thread_counters()->products;
  typedef float Row __attribute__((ext_vector_type(8)));
  for (int i = 0; i < 8; ++i) {
    Row sum = *(const Row*)&group->c[i * 8];
    for (int k = 0; k < 8; ++k) {
      const Row left = group->a[i * 8 + k];
      sum = __builtin_elementwise_fma(left, *(const Row*)&group->b[k * 8], sum);
    }
    *(Row*)&group->d[i * 8] = sum;
  }
}

// The result of thread_elements(). Apple's type is a vector of 64 elements of which a lane holds two. It can
// be indexed, but does not convert to a vector of two.
template <class T>
struct alignas(2 * sizeof(T)) ThreadElements {
  T values[2];
  SOFTMETAL_INLINE T& operator[](int i) { return values[i]; }
  SOFTMETAL_INLINE const T& operator[](int i) const { return values[i]; }
};

template <class D, class A, class B, class C>
SOFTMETAL_UNCHECKED ThreadElements<D> multiply_operation(ThreadElements<A> a, ThreadElements<B> b,
                                                         ThreadElements<C> c, Line line) {
  softmetal_simdgroup* group = softmetal_current_lane()->simdgroup;
  const Fragment f = fragment();
  const int first = f.row * 8 + f.column;
  for (int i = 0; i < 2; ++i) {
    group->a[first + i] = (float)a[i];
    group->b[first + i] = (float)b[i];
    group->c[first + i] = (float)c[i];
  }
  softmetal_rendezvous_all(multiply, line.number);
  return {(D)group->d[first], (D)group->d[first + 1]};
}
}  // namespace softmetal

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
    elements = {f.row == f.column ? diagonal : (T)0, f.row == f.column + 1 ? diagonal : (T)0};
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
  m.elements = {value, value};
  return m;
}

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
      m.elements = {(T)p[f.column * stride + f.row], (T)p[(f.column + 1) * stride + f.row]};               \
    else                                                                                                   \
      m.elements = {(T)p[f.row * stride + f.column], (T)p[f.row * stride + f.column + 1]};                 \
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
SOFTMETAL_MATRIX_MEMORY(SOFTMETAL_DEVICE)
SOFTMETAL_MATRIX_MEMORY(SOFTMETAL_THREADGROUP)
#undef SOFTMETAL_MATRIX_MEMORY

template <class D, class A, class B, class C>
SOFTMETAL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                    const simdgroup_matrix<A, 8, 8>& a,
                                                    const simdgroup_matrix<B, 8, 8>& b,
                                                    const simdgroup_matrix<C, 8, 8>& c, SOFTMETAL_LINE) {
  d.elements = softmetal::multiply_operation<D, A, B, C>(a.elements, b.elements, c.elements, line);
}
template <class D, class A, class B>
SOFTMETAL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                         const simdgroup_matrix<B, 8, 8>& b, SOFTMETAL_LINE) {
  d.elements = softmetal::multiply_operation<D, A, B, D>(a.elements, b.elements, {}, line);
}
template <class T>
SOFTMETAL_INLINE simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a,
                                                     const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> product;
  simdgroup_multiply(product, a, b);
  return product;
}
}  // namespace metal
